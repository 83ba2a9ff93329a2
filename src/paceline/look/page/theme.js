// Light and dark. The colors of text and lines are in page.css; the colors of curves are made readable on either
// background.

const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const theme = { chosen: "", printing: false, inks: new Map(), changed: new Set() };

function isDark() {
  if (theme.printing) return false;
  return theme.chosen ? theme.chosen === "dark" : darkSystem.matches;
}

function applyTheme() {
  document.documentElement.style.colorScheme = isDark() ? "dark" : "light";
  theme.inks.clear();
  for (const redraw of theme.changed) redraw();
}

function themeButton() {
  const words = () => (isDark() ? "Light" : "Dark");
  const root = button(
    words(),
    () => {
      theme.chosen = isDark() ? "light" : "dark";
      applyTheme();
    },
    { class: "theme", title: "Switch between light and dark" },
  );
  theme.changed.add(() => fill(root, words()));
  return root;
}

darkSystem.addEventListener("change", applyTheme);
addEventListener("beforeprint", () => {
  theme.printing = true;
  applyTheme();
});
addEventListener("afterprint", () => {
  theme.printing = false;
  applyTheme();
});

// The present value of a color in page.css, such as ink("--text").
function ink(name) {
  if (!theme.inks.has(name)) {
    const probe = make("span", { style: { color: `var(${name})` }, hidden: true });
    document.body.append(probe);
    theme.inks.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return theme.inks.get(name);
}

// Red, green and blue from 0 to 255, and opacity from 0 to 1, of "#rrggbb", "#rrggbbaa", "rgb(...)" or "rgba(...)".
function channels(color) {
  if (color.startsWith("#")) {
    const parts = [1, 3, 5, 7].map((at) => parseInt(color.slice(at, at + 2), 16));
    return [parts[0], parts[1], parts[2], Number.isNaN(parts[3]) ? 1 : parts[3] / 255];
  }
  const parts = color.match(/[\d.]+/g).map(Number);
  return [parts[0], parts[1], parts[2], parts[3] ?? 1];
}

function luminance(parts) {
  const [red, green, blue] = parts.map((part) => {
    const share = part / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// The color of a curve, moved away from the background until it has a contrast of 3 to 1.
function readable(color) {
  const key = `readable ${color}`;
  if (!theme.inks.has(key)) {
    const background = luminance(channels(ink("--paper")));
    const toward = isDark() ? 255 : 0;
    let parts = channels(color).slice(0, 3);
    for (let i = 0; i < 20; i += 1) {
      const [low, high] = [luminance(parts), background].sort((a, b) => a - b);
      if ((high + 0.05) / (low + 0.05) >= 3.2) break;
      parts = parts.map((part) => part + (toward - part) * 0.12);
    }
    theme.inks.set(key, `rgb(${parts.map(Math.round).join(", ")})`);
  }
  return theme.inks.get(key);
}
