// Each worker in figures, and what it spent its time on.

function workersPanel() {
  const place = make("div");
  const colors = make("div");
  const root = section("Time use of each worker", colors, place);
  let found = null;
  let longest = 1;
  let digits = 1;
  let speed = 1;
  const second = (kind) => ({
    title: `${kindWord(kind.name)}, s`,
    value: (row) => row.time_s[kind.name] ?? 0,
    text: (row) => fixed(row.time_s[kind.name] ?? 0, digits),
    number: true,
    needed: (row) => (row.time_s[kind.name] ?? 0) > 0,
  });
  return {
    root,
    show: (report) => {
      const { workers } = report;
      root.hidden = !workers.length;
      longest = Math.max(...workers.map((row) => sumOf(row.time_s)), 1e-9);
      digits = decimalsFor(Math.max(longest, ...workers.map((row) => row.awaited_s)));
      fill(colors, legend(totalTime(workers), false));
      speed = decimalsFor(Math.max(...workers.map((row) => row.samples_per_s ?? 0)));
      found ??= table(
        "Workers",
        [
          {
            title: "worker",
            value: (row) => row.worker,
            text: (row) => row.title ?? String(row.worker),
            number: true,
          },
          {
            title: "time by kind",
            value: (row) => sumOf(row.time_s),
            text: (row) => stackedBar(row.time_s, row.title ? undefined : longest),
            wide: true,
            sortable: false,
          },
          { title: "machine", text: (row) => row.machine ?? "", needed: (row) => row.machine },
          { title: "device", text: (row) => row.device ?? "", needed: (row) => row.device },
          {
            title: "iterations",
            value: (row) => row.iterations,
            text: (row) => whole(row.iterations),
            number: true,
          },
          {
            title: "samples",
            value: (row) => row.samples,
            text: (row) => whole(row.samples),
            number: true,
            needed: (row) => row.samples > 0,
          },
          {
            title: "share of updates",
            value: (row) => row.share,
            text: (row) => percent(row.share),
            number: true,
            needed: (row) => known(row.share),
          },
          {
            title: "samples/s",
            value: (row) => row.samples_per_s,
            text: (row) => fixed(row.samples_per_s, speed),
            number: true,
            needed: (row) => known(row.samples_per_s),
          },
          {
            title: "mean batch",
            value: (row) => row.mean_batch,
            text: (row) => fixed(row.mean_batch, 1),
            number: true,
            needed: (row) => known(row.mean_batch),
          },
          {
            title: "awaited by others, s",
            value: (row) => row.awaited_s,
            text: (row) => fixed(row.awaited_s, digits),
            number: true,
            needed: (row) => row.awaited_s > 0,
          },
          ...kinds.map(second),
          { title: "fate", text: fateWords, needed: (row) => row.fate && row.fate !== "finished" },
        ],
        { tall: true },
      );
      if (!place.firstChild) place.append(found.root);
      found.show(workers, workers.length > 1 ? totalRow(workers) : null);
    },
  };
}

function fateWords(row) {
  return row.why ? `${row.fate}: ${row.why}` : (row.fate ?? "");
}

function totalRow(workers) {
  const sum = (value) => workers.reduce((total, row) => total + (value(row) ?? 0), 0);
  return {
    title: "all",
    fate: "",
    iterations: sum((row) => row.iterations),
    samples: sum((row) => row.samples),
    samples_per_s: workers.some((row) => known(row.samples_per_s)) ? sum((row) => row.samples_per_s) : null,
    share: workers.some((row) => known(row.share)) ? 1 : null,
    mean_batch: null,
    awaited_s: sum((row) => row.awaited_s),
    time_s: totalTime(workers),
  };
}
