// DOM elements, number formats, and requests to the server. Texts of runs are inserted as text, never as HTML.

export const h = (tag, options = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "colour") element.style.setProperty("--colour", value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return element;
};

export const fetchJson = async (name, parameters = {}) => {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    for (const each of Array.isArray(value) ? value : [value]) if (each !== null && each !== undefined) query.append(key, each);
  const response = await fetch(`/api/${name}?${query}`);
  if (!response.ok) throw new Error(`${name}: ${response.status}`);
  return response.json();
};

let colourCache = {};
export const colour = name =>
  colourCache[name] ??= getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888888";
export const forgetColours = () => { colourCache = {}; };

// -- numbers

export const count = value => value.toLocaleString("en-US");
export const short = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, one] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
    if (size >= one * 0.9995) return trim((value / one).toPrecision(3)) + unit;
  return trim(value.toPrecision(3));
};
const trim = text => text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
export const exact = value => value === null || value === undefined ? "not finite" : String(value);
export const plain = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(3);
  return size < 100 ? value.toFixed(size < 10 ? 4 : 3) : count(Math.round(value * 10) / 10);
};
export const bytes = value => {
  if (value === null || value === undefined) return "–";
  for (const [unit, one] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(value) >= one) return (value / one).toFixed(Math.abs(value) < 100 * one && value % one ? 2 : 0) + " " + unit;
  return value + " B";
};
export const seconds = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size >= 86400) return (value / 86400).toFixed(1) + " d";
  if (size >= 3600) return (value / 3600).toFixed(1) + " h";
  if (size >= 120) return (value / 60).toFixed(1) + " min";
  for (const [unit, one] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (size >= one * 0.9995) return trim((value / one).toPrecision(3)) + " " + unit;
  return trim((value / 1e-9).toPrecision(3)) + " ns";
};
export const percent = value => value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %";

// -- tables

export const table = (caption, heads, rows, {texts = [0], wraps = []} = {}) => h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
  h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads.map((head, index) => h("th", {scope: "col", class: texts.includes(index) ? "text" : null}, head)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, index) =>
      h("td", {class: [texts.includes(index) && "text", wraps.includes(index) && "wrap"].filter(Boolean).join(" ") || null}, cell)))))));

// Index of the number nearest to a value, in ascending numbers.
export const nearest = (numbers, value) => {
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle; else high = middle;
  }
  return numbers.length && Math.abs(numbers[high] - value) < Math.abs(numbers[low] - value) ? high : low;
};
