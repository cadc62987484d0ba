// The timeline of a pipeline in one step: what each rank computes when, as measured and as scheduled.

import {h, colour, table} from "./dom.js";
import {KINDS as UNITS, count, percent, roundNumbers, seconds} from "./numbers.js";

const KINDS = {F: "forward", B: "backward", I: "backward, input", W: "backward, weight"};
const LEFT = 118, ROW = 24, GAP = 4, HEAD = 26;

export class Timeline {
  constructor(swatch, name, choose) {
    this.cursor = null;
    this.steps = h("select", {"aria-label": "Measured step", onchange: () => choose(this.steps.value === "latest" ? null : Number(this.steps.value))});
    this.tableButton = h("button", {type: "button", "aria-pressed": "false", "aria-label": "Numbers as a table: timeline", onclick: () => this.toggleTable()}, "table");
    this.legend = h("ul", {class: "legend"});
    this.canvas = h("canvas");
    this.plot = h("div", {class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
      "aria-label": `Timeline of the pipeline (${name}). Arrow keys select an action, t shows a table.`,
      onkeydown: event => this.key(event), onpointermove: event => this.point(event), onpointerleave: () => { this.cursor = null; this.show(); }}, this.canvas);
    this.said = h("p", {class: "said", "aria-live": "polite"});
    this.numbers = h("div", {hidden: true});
    this.element = h("figure", {class: "card"}, h("header", {}, h("h3", {}, h("span", {class: "swatch", colour: swatch}), "Timeline", h("small", {}, name)), this.steps, this.tableButton),
      this.legend, this.plot, this.said, this.numbers);
    new ResizeObserver(() => this.show()).observe(this.plot);
  }

  update(found) {
    this.found = found;
    const options = ["latest", ...found.steps.slice().reverse()];
    if ([...this.steps.options].map(each => each.value).join() !== options.join()) {
      const was = this.steps.value;
      this.steps.replaceChildren(...options.map(step => h("option", {value: step}, step === "latest" ? "latest step" : `step ${count(step)}`)));
      if (options.map(String).includes(was)) this.steps.value = was;
    }
    const lanes = this.lanes = [];
    const ends = found.measured.map(each => Math.max(...each.actions.map(action => action[4])));
    this.end = Math.max(0, ...ends);
    for (const each of found.measured) lanes.push({label: `rank ${each.rank}`, kind: "measured", actions: each.actions, scale: 1});
    const planned = found.planned, last = planned ? Math.max(0, ...planned.ranks.flat().map(action => action[4])) : 0;
    this.end = this.end || last;
    // Scaled to the measured length, so that the shapes can be compared.
    if (planned) planned.ranks.forEach((actions, rank) => lanes.push({label: `stage rank ${rank}`, kind: "planned", actions, scale: last ? this.end / last : 1, unit: true}));
    this.waits = found.measured.length ? 1 - found.measured.flatMap(each => each.actions).reduce((sum, action) => sum + action[4] - action[3], 0) / (this.end * found.measured.length) : null;
    const kinds = Object.keys(KINDS).filter(kind => lanes.some(lane => lane.actions.some(action => action[0] === kind)));
    this.legend.replaceChildren(...kinds.map(kind => h("li", {}, h("span", {class: "swatch", colour: `var(--act-${kind})`}), KINDS[kind])),
      h("li", {}, h("span", {class: "swatch", colour: "var(--bubble)"}), "waiting"));
    this.summary = [found.step !== null && `step ${count(found.step)}: measured ${seconds(this.end)}, waiting ${percent(this.waits)}`,
      planned && `planned (${planned.schedule}): waiting ${percent(planned.bubble)}`].filter(Boolean).join("; ") || "no measurements yet";
    this.cursor = null;
    this.show();
    if (!this.numbers.hidden) this.fillTable();
  }

  rows() {
    let y = 0, kind = null;
    return this.lanes.map(lane => {
      if (lane.kind !== kind) { y += HEAD; kind = lane.kind; }
      const row = {...lane, y};
      y += ROW + GAP;
      return row;
    });
  }

  show() {
    if (!this.lanes) return;
    const width = this.plot.clientWidth, rows = this.rows(), height = (rows.at(-1)?.y ?? 0) + ROW + 26;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1, pen = this.canvas.getContext("2d");
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const family = getComputedStyle(document.body).fontFamily, wide = width - LEFT - 10;
    pen.textBaseline = "middle";
    let kind = null;
    rows.forEach((row, index) => {
      pen.textAlign = "left";
      if (row.kind !== kind) {
        kind = row.kind;
        pen.fillStyle = colour("text");
        pen.font = `600 12px ${family}`;
        pen.fillText(kind === "measured" ? "measured" : "planned, scaled to the same length", 0, row.y - HEAD / 2 + 2);
      }
      pen.font = `12px ${family}`;
      pen.fillStyle = colour("quiet");
      pen.fillText(row.label, 0, row.y + ROW / 2);
      pen.fillStyle = colour("bubble");
      pen.fillRect(LEFT, row.y, wide, ROW);
      const first = Math.min(...row.actions.map(action => action[1]));
      pen.textAlign = "center";
      row.actions.forEach(([name, stage, batch, start, end], number) => {
        const x = LEFT + start * row.scale / this.end * wide, w = Math.max(1, (end - start) * row.scale / this.end * wide);
        pen.globalAlpha = stage === first ? 1 : 0.68;
        pen.fillStyle = colour(`act-${KINDS[name] ? name : "F"}`);
        pen.fillRect(x, row.y, Math.max(0.8, w - 1), ROW);
        pen.globalAlpha = 1;
        if (w > 15) {
          pen.fillStyle = colour("act-ink");
          pen.fillText(String(batch), x + w / 2 - 0.5, row.y + ROW / 2 + 0.5);
        }
        if (this.cursor && this.cursor[0] === index && this.cursor[1] === number) {
          pen.strokeStyle = colour("text");
          pen.lineWidth = 2;
          pen.strokeRect(x, row.y + 1, Math.max(2, w - 1), ROW - 2);
        }
      });
    });
    pen.fillStyle = colour("quiet");
    pen.font = `11px ${family}`;
    const bottom = (rows.at(-1)?.y ?? 0) + ROW + 14, measured = this.found.measured.length;
    for (const [at, text] of roundNumbers(measured ? UNITS.seconds : UNITS.plain, this.end, Math.max(1, wide / 80))) {
      const half = pen.measureText(text).width / 2, x = LEFT + wide * at / this.end;
      pen.textAlign = "center";
      pen.fillText(text, Math.min(x, width - half), bottom);
    }
    this.said.textContent = this.cursor ? this.words() : this.summary;
  }

  words() {
    const row = this.lanes[this.cursor[0]], [name, stage, batch, start, end] = row.actions[this.cursor[1]];
    const time = row.unit ? value => value.toFixed(2) : seconds;
    return `${row.kind}, ${row.label}: ${KINDS[name] || name} of micro-batch ${batch}, stage ${stage}, ${time(start)} to ${time(end)} (${time(end - start)}${row.unit ? " " + this.found.planned.unit : ""})`;
  }

  point(event) {
    const rows = this.rows(), wide = this.plot.clientWidth - LEFT - 10;
    const index = rows.findIndex(row => event.offsetY >= row.y && event.offsetY < row.y + ROW);
    const at = index < 0 ? -1 : rows[index].actions.findIndex(([, , , start, end]) => {
      const time = (event.offsetX - LEFT) / wide * this.end / rows[index].scale;
      return time >= start && time <= end;
    });
    this.cursor = at < 0 ? null : [index, at];
    this.show();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const along = {ArrowLeft: -1, ArrowRight: 1}[event.key], across = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (event.key === "t") this.toggleTable();
    else if (event.key === "Escape") this.cursor = null;
    else if (!this.lanes?.length || !(along || across)) return;
    else if (!this.cursor) this.cursor = [0, 0];
    else if (along) this.cursor[1] = Math.max(0, Math.min(this.lanes[this.cursor[0]].actions.length - 1, this.cursor[1] + along));
    else {
      const row = Math.max(0, Math.min(this.lanes.length - 1, this.cursor[0] + across));
      this.cursor = [row, Math.min(this.cursor[1], this.lanes[row].actions.length - 1)];
    }
    event.preventDefault();
    event.stopPropagation();
    this.show();
  }

  toggleTable() {
    this.numbers.hidden = !this.numbers.hidden;
    this.tableButton.setAttribute("aria-pressed", !this.numbers.hidden);
    if (!this.numbers.hidden) this.fillTable();
  }

  fillTable() {
    const rows = this.lanes.flatMap(lane => lane.actions.map(([name, stage, batch, start, end]) =>
      [lane.kind, lane.label, KINDS[name] || name, String(stage), String(batch), lane.unit ? start.toFixed(2) : seconds(start), lane.unit ? end.toFixed(2) : seconds(end)]));
    this.numbers.replaceChildren(table(`Timeline: ${rows.length > 500 ? "the first 500 of " + rows.length : rows.length} actions`,
      ["", "rank", "action", "stage", "micro-batch", "start", "end"], rows.slice(0, 500), {texts: [0, 1, 2]}));
  }

  redraw() { this.show(); }
}
