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

// -- tables

export const table = (caption, heads, rows, {texts = [0], wraps = []} = {}) => {
  const classes = index => [texts.includes(index) && "text", wraps.includes(index) && "wrap"].filter(Boolean).join(" ") || null;
  return h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head, index) => h("th", {scope: "col", class: classes(index)}, head)))),
      h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, index) => h("td", {class: classes(index)}, cell)))))));
};
