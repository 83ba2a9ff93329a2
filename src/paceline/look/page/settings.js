// The settings of the run, the command that repeats it, and its figures.

function settingsPanel() {
  const command = make("code");
  const copied = make("span", { role: "status", class: "note" });
  const copy = button("Copy", async () =>
    fill(copied, (await copyText(command)) ? "copied" : "selected: press ctrl (cmd) C"),
  );
  const commandPart = subsection(
    "The command that repeats this run",
    scrollBox("The command", "pre", command),
    make("div", { class: "tools" }, copy, copied),
  );
  const changed = settingsTable("Settings that differ from the default");
  const changedPart = subsection("Settings that differ from the default", changed.root);
  const defaults = make("div");
  let report = null;
  const rest = details("Settings with their default value", () => {
    const { root, show } = settingsTable("Settings with their default value");
    return { root, show: () => show(report.settings.filter((setting) => setting.default)) };
  });
  defaults.append(rest.root);
  const figures = table("Figures", [
    { title: "figure", text: (row) => row.name, sortable: false },
    { title: "value", text: (row) => row.value, sortable: false, wide: true },
  ]);
  const figuresPart = subsection("Figures", figures.root);
  const folder = make("p", { class: "note" });
  const root = section(
    "Settings and command",
    make("div", { class: "pair" }, make("div", {}, commandPart, changedPart, defaults), figuresPart),
    folder,
  );
  return {
    root,
    show: (next) => {
      report = next;
      commandPart.hidden = !report.command;
      if (command.textContent !== report.command) fill(command, report.command);
      const differing = report.settings.filter((setting) => !setting.default);
      changedPart.hidden = !differing.length;
      changed.show(differing);
      defaults.hidden = differing.length === report.settings.length;
      rest.show();
      const rows = Object.entries(report.figures).map(([name, value]) => ({ name, value }));
      figuresPart.hidden = !rows.length;
      figures.show(rows);
      fill(folder, report.run_dir && `Run directory: ${report.run_dir}`);
      root.hidden = !report.settings.length && !report.command && !rows.length && !report.run_dir;
    },
  };
}

function settingsTable(title) {
  return table(title, [
    { title: "setting", text: (row) => row.name, sortable: false },
    { title: "value", text: (row) => row.value, sortable: false, wide: true },
  ]);
}

// Copy the text of an element. Without access to the clipboard, select the text and return false.
async function copyText(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
