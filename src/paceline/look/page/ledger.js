// Panels for traffic, machines, the fates of pushes and samples, single events, and notes.

function trafficPanel() {
  let most = 1;
  const links = table(
    "Links",
    [
      { title: "from", text: (row) => row.sender },
      { title: "to", text: (row) => row.receiver },
      {
        title: "bytes",
        value: (row) => row.total_bytes,
        text: (row) => bytes(row.total_bytes),
        share: (row) => row.total_bytes / most,
        number: true,
      },
      {
        title: "rate",
        value: (row) => row.bytes_per_s,
        text: (row) => scaled(row.bytes_per_s, "B/s"),
        number: true,
        needed: (row) => known(row.bytes_per_s),
      },
    ],
    { tall: true },
  );
  const machines = table("Machines", [
    { title: "machine", text: (row) => row.machine },
    { title: "workers", value: (row) => row.workers.length, text: (row) => row.workers.join(", ") },
    { title: "devices", text: (row) => [...new Set(row.devices)].join(", ") || "CPU" },
    {
      title: "samples/s",
      value: (row) => row.speed,
      text: (row) => short(row.speed || null),
      number: true,
      needed: (row) => row.speed,
    },
    {
      title: "last heartbeat",
      value: (row) => row.silent_s,
      text: (row) => (known(row.silent_s) ? `${duration(row.silent_s)} ago` : ""),
      number: true,
      needed: (row) => known(row.silent_s),
    },
    { title: "servers", text: (row) => row.servers.join(", "), needed: (row) => row.servers.length > 0 },
  ]);
  const linkPart = subsection("Links between machines", links.root);
  const machinePart = subsection("Machines", machines.root);
  const root = section("Machines and traffic", make("div", { class: "pair" }, machinePart, linkPart));
  return {
    root,
    show: (report) => {
      const found = machinesOf(report);
      root.hidden = !report.links.length && !found.length;
      linkPart.hidden = !report.links.length;
      machinePart.hidden = !found.length;
      most = Math.max(...report.links.map((row) => row.total_bytes), 1);
      links.show(report.links);
      machines.show(found);
    },
  };
}

function machinesOf(report) {
  const found = new Map();
  const at = (machine) => {
    if (!found.has(machine)) found.set(machine, { machine, workers: [], devices: [], speed: 0, servers: [] });
    return found.get(machine);
  };
  for (const worker of report.workers) {
    if (!worker.machine) continue;
    const row = at(worker.machine);
    row.workers.push(worker.worker);
    row.devices.push(worker.device || "CPU");
    row.speed += worker.samples_per_s ?? 0;
  }
  for (const each of report.live?.machines ?? [])
    Object.assign(at(each.machine), { silent_s: each.silent_s, servers: each.servers });
  return [...found.values()];
}

function ledgerPanel() {
  const pushes = countsTable("What became of the pushes");
  const samples = countsTable("What became of the samples");
  const pair = make("div", { class: "pair" }, pushes.root, samples.root);
  const root = section("Pushes and samples", pair);
  return {
    root,
    show: (report) => {
      pushes.show(report.pushes);
      samples.show(report.samples);
      root.hidden = pushes.root.hidden && samples.root.hidden;
    },
  };
}

// Counts that add up to the row "all".
function countsTable(title) {
  let sum = 1;
  const found = table(title, [
    { title: "fate", text: (row) => row.name },
    {
      title: "number",
      value: (row) => row.count,
      text: (row) => whole(row.count),
      share: (row) => (row.all ? null : row.count / sum),
      number: true,
    },
    { title: "share", value: (row) => row.count, text: (row) => percent(row.count / sum), number: true },
  ]);
  const root = subsection(title, found.root);
  return {
    root,
    show: (counts) => {
      const rows = Object.entries(counts)
        .filter(([, count]) => count)
        .map(([name, count]) => ({ name: name.replaceAll("_", " "), count }));
      sum = rows.reduce((total, row) => total + row.count, 0) || 1;
      root.hidden = !rows.length;
      found.show(
        rows,
        rows.length > 1
          ? { name: "all", count: rows.reduce((total, row) => total + row.count, 0), all: true }
          : null,
      );
    },
  };
}

function marksPanel() {
  const marks = table(
    "What happened",
    [
      { title: "time", value: (row) => row.time_s, text: (row) => duration(row.time_s), number: true },
      {
        title: "kind",
        text: (row) => `${MARK_SIGNS[row.kind] ?? "•"}\u00a0${row.kind}`,
        value: (row) => row.kind,
      },
      {
        title: "worker",
        value: (row) => row.worker,
        text: (row) => (row.worker < 0 ? "" : String(row.worker)),
        number: true,
        needed: (row) => row.worker >= 0,
      },
      { title: "what happened", text: (row) => row.words, wide: true },
    ],
    { tall: true },
  );
  const root = section("What happened, and when", marks.root);
  return {
    root,
    show: (report) => {
      root.hidden = !report.marks.length;
      marks.show(report.marks);
    },
  };
}

function notesPanel() {
  const list = make("ul", { class: "notes" });
  const root = section("Notes", list);
  return {
    root,
    show: (report) => {
      root.hidden = !report.notes.length;
      fill(
        list,
        report.notes.map((note) => make("li", {}, note)),
      );
    },
  };
}
