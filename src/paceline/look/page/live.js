// A page that follows a run: fetches its report again and again, and says how old it is.

const INTERVAL_S = 2;
const PATIENCE = 5; // the next request waits for this many times as long as the last report took
const MOST_FAILURES = 3; // after this number of failures, the connection counts as lost

// What each worker does now.
function livePanel() {
  const facts = make("p", { class: "note" });
  const workers = table(
    "What each worker does now",
    [
      { title: "worker", value: (row) => row.worker, text: (row) => String(row.worker), number: true },
      { title: "machine", text: (row) => row.machine },
      { title: "does", text: (row) => row.state },
      { title: "since", value: (row) => row.state_s, text: (row) => duration(row.state_s), number: true },
      {
        title: "iteration",
        value: (row) => row.iteration,
        text: (row) => (row.iteration === null ? MISSING : whole(row.iteration)),
        number: true,
      },
      {
        title: "loss",
        value: (row) => row.loss,
        text: (row) => short(row.loss),
        number: true,
        needed: (row) => known(row.loss),
      },
      {
        title: "samples/s",
        value: (row) => row.samples_per_s,
        text: (row) => short(row.samples_per_s),
        number: true,
        needed: (row) => known(row.samples_per_s),
      },
      {
        title: "staleness",
        value: (row) => row.staleness,
        text: (row) => whole(row.staleness),
        number: true,
        needed: (row) => known(row.staleness),
      },
      { title: "waits for", text: waitWords, wide: true, needed: (row) => row.waits_for },
      { title: "was lost", text: (row) => row.losses.at(-1) ?? "", needed: (row) => row.losses.length > 0 },
    ],
    { tall: true },
  );
  const root = section("What the workers do now", facts, workers.root);
  return {
    root,
    show: (report) => {
      root.hidden = !report.live;
      if (root.hidden) return;
      fill(
        facts,
        [
          report.live.sync && `Sync model ${report.live.sync}, ${plural(report.live.servers, "server")}.`,
          report.live.shortage,
        ]
          .filter(Boolean)
          .join(" "),
      );
      workers.show(report.live.workers);
    },
  };
}

function waitWords(row) {
  if (!row.last.length) return row.waits_for;
  return `${row.waits_for}; last: worker${row.last.length > 1 ? "s" : ""} ${row.last.join(", ")}`;
}

// The report that is fetched from a path, or the problem in words.
async function fetched(path) {
  try {
    const answer = await fetch(path, { cache: "no-store", credentials: "same-origin" });
    return answer.ok
      ? { report: await answer.json() }
      : { problem: `the answer has status ${answer.status}` };
  } catch (error) {
    return { problem: error.message };
  }
}

// Fetch the report from `path` again and again until the run has ended, and pass each report to `show`. Return the
// element that says how old the shown report is.
function follow(path, first, show) {
  const root = make("p", { class: "live" });
  const words = make("span", { role: "status" });
  const age = make("span", {});
  root.append(words, age);
  let [shownAt, failures, ended] = [performance.now(), 0, false];
  let timer = null;
  const kept = `${first.run_dir}/report.html`;

  const state = (text, kind) => {
    if (words.textContent !== text) fill(words, text);
    root.className = `live ${kind}`;
  };
  const tell = () =>
    fill(age, ended ? "" : `, updated ${duration(Math.round((performance.now() - shownAt) / 1000))} ago`);

  async function poll() {
    const begun = performance.now();
    const { report, problem } = await fetched(path);
    const tookMs = performance.now() - begun;
    timer = null;
    if (report) {
      failures = 0;
      shownAt = performance.now();
      show(report);
      if (report.state !== "running") return end(report);
      state("live", "on");
    } else {
      failures += 1;
      if (failures >= MOST_FAILURES) {
        const otherwise = `If the run has ended, its report is ${kept}.`;
        state(`The connection to the run is lost (${problem}). ${otherwise} The last known state is below`, "lost");
      }
    }
    tell();
    plan(Math.max(INTERVAL_S * 1000 * Math.min(8, 2 ** Math.max(0, failures - 1)), PATIENCE * tookMs));
  }

  function plan(wait) {
    if (!ended && !document.hidden && timer === null) timer = setTimeout(poll, wait);
  }

  function end(report) {
    ended = true;
    clearInterval(clockwork);
    const how = report.state === "finished" ? "The run has finished." : `The run has ended: ${STATE_WORDS[report.state]}.`;
    state(`${how} Its report is ${kept}.`, "ended");
    tell();
  }

  const clockwork = setInterval(tell, 1000);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(timer);
      timer = null;
    } else {
      plan(0);
    }
  });
  state("live", "on");
  tell();
  if (first.state === "running") plan(INTERVAL_S * 1000);
  else end(first);
  return root;
}
