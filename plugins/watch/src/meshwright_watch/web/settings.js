// The settings of a run: those that differ from the defaults, or all.

import {h, table} from "./dom.js";

export class Settings {
  constructor(swatch, name) {
    this.name = name;
    this.all = h("button", {type: "button", "aria-pressed": "false", "aria-label": `All settings: ${name}`, onclick: () => {
      this.all.setAttribute("aria-pressed", this.all.getAttribute("aria-pressed") !== "true");
      this.show();
    }}, "all");
    this.rows = h("div");
    this.element = h("figure", {class: "card"}, h("header", {}, h("h3", {}, h("span", {class: "swatch", colour: swatch}), "Settings", h("small", {}, name)), this.all), this.rows);
  }

  // found: key, value and default of each setting
  update(found) {
    this.found = found;
    this.show();
  }

  show() {
    const isAll = this.all.getAttribute("aria-pressed") === "true";
    const rows = this.found.filter(([, value, usual]) => isAll || value !== usual)
      .map(([key, value, usual]) => [key, value === usual ? value : h("b", {}, value), value === usual ? "" : usual]);
    this.rows.replaceChildren(table(isAll ? `All ${rows.length} settings; bold: not the default` : `${rows.length} of ${this.found.length} settings differ from the defaults`,
      ["key", "value", "default"], rows, {texts: [0, 1, 2], wraps: [0, 1, 2]}));
  }
}
