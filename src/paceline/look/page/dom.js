// Makes elements. Text enters the page only as text nodes, so no name can become markup.
//
// Each part of the page is a *panel*: an object with its element `root` and a method `show(report)`, which may be
// called again with a newer report. Controls are made once, so that they keep their state and the focus.

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") {
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...present(children));
  return element;
}

function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

function present(children) {
  return children
    .flat(2)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "");
}

let lastId = 0;

function newId(prefix) {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

// A section of the page with its heading.
function section(title, ...children) {
  const id = newId("section");
  return make("section", { "aria-labelledby": id }, make("h2", { id }, title), ...children);
}

function subsection(title, ...children) {
  return make("div", { class: "sub" }, make("h3", {}, title), ...children);
}

// A box that scrolls if its content is larger than the box. Only then can the box have the focus. The attribute
// `data-more` names the sides on which there is more content, and the style shows this, because many systems show no
// scroll bar before the reader scrolls.
function scrollBox(label, kind, ...children) {
  const root = make("div", { class: kind, onscroll: () => sign() }, ...children);
  function sign() {
    const right = root.scrollWidth - root.clientWidth - root.scrollLeft > 1;
    const sides = [root.scrollLeft > 1 && "left", right && "right"].filter(Boolean);
    if (sides.length) root.dataset.more = sides.join(" ");
    else delete root.dataset.more;
  }
  const observer = new ResizeObserver(() => {
    sign();
    const scrolls = root.scrollWidth > root.clientWidth + 1 || root.scrollHeight > root.clientHeight + 1;
    for (const [name, value] of [
      ["tabindex", "0"],
      ["role", "group"],
      ["aria-label", label],
    ]) {
      if (scrolls) root.setAttribute(name, value);
      else root.removeAttribute(name);
    }
  });
  for (const each of [root, ...children]) observer.observe(each);
  return root;
}

// A panel that is made only when the reader opens it, and shows what is new only while it is open.
function details(title, makePanel) {
  let panel = null;
  const root = make("details", { ontoggle: () => show() }, make("summary", {}, title));
  function show() {
    if (!root.open) return;
    if (!panel) {
      panel = makePanel();
      root.append(panel.root);
    }
    panel.show();
  }
  return { root, show };
}

// A choice between several options, each [value, words]. `limit` hides the options that are not possible.
function choice(label, options, chosen, change) {
  const name = newId("choice");
  const labels = new Map();
  for (const [value, words] of options) {
    const input = make("input", {
      type: "radio",
      name,
      value,
      checked: value === chosen,
      onchange: () => change(value),
    });
    labels.set(value, make("label", {}, input, make("span", {}, words)));
  }
  const root = make("fieldset", { class: "choice" }, make("legend", {}, label), ...labels.values());
  const limit = (possible) => {
    for (const [value, element] of labels) element.hidden = !possible.includes(value);
  };
  return { root, limit };
}

function checkbox(label, change) {
  return make(
    "label",
    { class: "check" },
    make("input", { type: "checkbox", onchange: (event) => change(event.target.checked) }),
    label,
  );
}

function button(label, press, properties = {}) {
  return make("button", { type: "button", onclick: press, ...properties }, label);
}
