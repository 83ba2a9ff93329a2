// Numbers as text. A missing number is a dash.

const MISSING = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

const formats = new Map(); // making a format takes long

function formatted(value, options) {
  const key = JSON.stringify(options);
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat("en-US", options));
  return formats.get(key).format(value);
}

// A number with a given number of decimals, or with about four significant digits.
function fixed(value, decimals) {
  return known(value)
    ? formatted(value, { minimumFractionDigits: decimals, maximumFractionDigits: decimals })
    : MISSING;
}

function short(value) {
  if (!known(value)) return MISSING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return formatted(value, size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
}

const whole = (value) => fixed(value, 0);

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function percent(share) {
  if (!known(share)) return MISSING;
  if (share > 0 && share < 0.005) return "< 1\u00a0%";
  return `${Math.round(100 * share)}\u00a0%`;
}

// Decimals such that the largest number of a column has about four digits.
function decimalsFor(largest) {
  return largest >= 1000 ? 0 : largest >= 10 ? 1 : largest >= 1 ? 2 : largest > 0 ? 4 : 0;
}

// A duration in two units at most.
function duration(s) {
  if (!known(s)) return MISSING;
  const size = Math.abs(s);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Number((s * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${Number((s * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(s.toPrecision(3))} s`;
  const total = Math.round(s);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

// A point in time of a run: seconds, or h:mm:ss in a long run, rounded to about `stepS`.
function clock(s, stepS, longestS) {
  const decimals = Math.min(4, Math.max(0, Math.ceil(-Math.log10(stepS) - 1e-9)));
  if (longestS < 120) return `${s.toFixed(decimals)} s`;
  const sign = s < 0 ? "-" : "";
  const rounded = Number(Math.abs(s).toFixed(decimals));
  const rest = (rounded % 60).toFixed(decimals).padStart(decimals ? decimals + 3 : 2, "0");
  const minutes = Math.floor(rounded / 60);
  if (longestS < 3600) return `${sign}${minutes}:${rest}`;
  return `${sign}${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

const SIZES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

function scaled(value, unit) {
  if (!known(value)) return MISSING;
  for (const [size, prefix] of SIZES) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${prefix}${unit}`;
  }
  return `${Number(value.toPrecision(3))} ${unit}`;
}

const bytes = (value) => scaled(value, "B");

// A number on an axis: as short as its step allows.
function tickText(value, step) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || step < 1e-6) {
    return value
      .toExponential(Math.min(6, Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9))))
      .replace("e+", "e");
  }
  for (const [unit, prefix] of SIZES) {
    if (size >= unit && unit > 1) return `${Number((value / unit).toPrecision(6))}${prefix}`;
  }
  return value.toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))));
}

// Round numbers from `low` to `high`, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return { step: 1, values: [low] };
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  return { step, values: multiples(low, high, step) };
}

const TIME_STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function timeTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (raw <= 5) return ticks(low, high, count);
  const step = TIME_STEPS.find((each) => each >= raw) ?? 86400 * Math.ceil(raw / 86400);
  return { step, values: multiples(low, high, step) };
}

function multiples(low, high, step) {
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) values.push(i * step);
  return values;
}

// Powers of ten, with steps between them if the range is small.
function logTicks(low, high, count) {
  const from = Math.log10(low);
  const to = Math.log10(high);
  if (to - from < 1) {
    const values = ticks(low, high, count).values.filter((value) => value > 0);
    return { step: values.length > 1 ? values[1] - values[0] : low, values };
  }
  const stride = Math.max(1, Math.ceil((to - from) / count));
  const values = [];
  for (let power = Math.ceil(from - 1e-9); power <= to + 1e-9; power += stride) values.push(10 ** power);
  return { step: low, values };
}
