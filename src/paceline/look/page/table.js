// Tables whose rows can be sorted.

// A column is {title, needed(row), value(row), text(row), share(row), number, wide, sortable}:
//   title   its heading; a function if the heading changes
//   needed  the column is shown if this is true for any row
//   value   what the rows are sorted by; its default is `text`
//   text    what the cell shows, or an element
//   share   share of the cell, from 0 to 1, that a bar behind the text fills
//   number  true for right-aligned figures
//   wide    true if the column takes the rest of the width
//   sortable  false if the rows cannot be sorted by this column
// `show(rows, total)` shows rows; `total`, if given, is a row that stays below the others.
function table(caption, columns, { tall = false } = {}) {
  const sorted = { column: null, down: true };
  const head = make("tr");
  const body = make("tbody");
  const foot = make("tfoot");
  const element = make(
    "table",
    {},
    make("caption", { class: "spoken" }, caption),
    make("thead", {}, head),
    body,
    foot,
  );
  const root = scrollBox(caption, tall ? "scroll tall" : "scroll", element);
  let [rows, total, shown] = [[], null, []];

  const headers = columns.map((column) => {
    const title =
      column.sortable === false
        ? make("span", {}, column.title)
        : button(headingOf(column), () => sort(column), { class: "sort" });
    return make("th", { scope: "col", class: column.number && "number" }, title);
  });

  function sort(column) {
    sorted.down = sorted.column === column ? !sorted.down : Boolean(column.number);
    sorted.column = column;
    draw();
  }

  function cell(tag, column, row) {
    const content = column.text(row);
    const share = column.share?.(row);
    const bar = known(share)
      ? make("span", { class: "meter", style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } })
      : null;
    const properties = {
      class: [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null,
    };
    return make(tag, tag === "th" ? { ...properties, scope: "row" } : properties, bar, content);
  }

  const rowOf = (row) =>
    make(
      "tr",
      {},
      shown.map((column, i) => cell(i === 0 ? "th" : "td", column, row)),
    );

  function draw() {
    shown = columns.filter((column) => !column.needed || rows.some(column.needed));
    const wanted = headers.filter((_, i) => shown.includes(columns[i]));
    // headers that stay keep the focus
    if (wanted.length !== head.children.length || wanted.some((each, i) => each !== head.children[i]))
      fill(head, wanted);
    headers.forEach((header, i) => {
      if (typeof columns[i].title === "function") fill(header.firstChild, headingOf(columns[i]));
      if (columns[i] === sorted.column)
        header.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    fill(body, ordered(rows, sorted).map(rowOf));
    fill(foot, total && rowOf(total));
    root.hidden = !rows.length;
  }

  return {
    root,
    show: (newRows, newTotal = null) => {
      [rows, total] = [newRows, newTotal];
      draw();
    },
  };
}

const headingOf = ({ title }) => (typeof title === "function" ? title() : title);

function ordered(rows, { column, down }) {
  if (!column) return rows;
  const value = column.value ?? column.text;
  const sign = down ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (
      sign * (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }))
    );
  });
}
