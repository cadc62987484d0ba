// Marks in charts of steps: checkpoints, restarts, faults and first differing steps.

import {colour} from "./dom.js";
import {shown} from "./state.js";

// Text by first differing step, of the first shown run.
export const divergences = new Map();

// Labels go into rows, so that they do not overlap.
export const marks = (u, hasLabels) => {
  const rows = [];
  const drawLabel = (text, x) => {
    if (!hasLabels) return;
    const right = bbox.left + bbox.width - x, measure = () => pen.measureText(text).width + 10 * ratio;
    const isLeft = measure() > right && x - bbox.left > right, room = isLeft ? x - bbox.left : right;
    // Shorten what is wider than the chart.
    while (text.length > 2 && measure() > room) text = text.slice(0, -2) + "…";
    const wide = measure(), from = isLeft ? x - wide : x;
    let row = rows.findIndex(last => last.every(([low, high]) => from >= high || from + wide <= low));
    if (row < 0) row = rows.push([]) - 1;
    rows[row].push([from, from + wide]);
    pen.textAlign = isLeft ? "right" : "left";
    // An outline in the background colour keeps it readable over lines.
    const ink = pen.strokeStyle;
    pen.strokeStyle = colour("card");
    pen.setLineDash([]);
    pen.lineWidth = 4 * ratio;
    pen.lineJoin = "round";
    pen.strokeText(text, x + (isLeft ? -5 : 5) * ratio, bbox.top + (9 + 14 * row) * ratio);
    pen.strokeStyle = ink;
    pen.fillText(text, x + (isLeft ? -5 : 5) * ratio, bbox.top + (9 + 14 * row) * ratio);
  };
  const {ctx: pen, bbox} = u, {min, max} = u.scales.x, ratio = globalThis.devicePixelRatio || 1;
  // The place of a step in pixels; null: not in the picture.
  const locate = (run, step) => {
    const at = run.position(step);
    return at === null || at < min || at > max ? null : Math.round(u.valToPos(at, "x", true));
  };
  pen.save();
  pen.font = `${11 * ratio}px system-ui, sans-serif`;
  for (const run of shown()) { let before = -Infinity; for (const event of run.marks) {
    const x = locate(run, event.step);
    if (x === null) continue;
    const low = bbox.top + bbox.height;
    pen.strokeStyle = pen.fillStyle = event.kind === "fault" ? colour("bad") : colour(run.variable);
    pen.lineWidth = 1.4 * ratio;
    if (event.kind === "checkpoint") {
      // Skip triangles that would overlap.
      if (x - before < 9 * ratio) continue;
      before = x;
      pen.beginPath();
      pen.moveTo(x, low - 7 * ratio);
      pen.lineTo(x - 4 * ratio, low);
      pen.lineTo(x + 4 * ratio, low);
      pen.fill();
      continue;
    }
    pen.setLineDash(event.kind === "fault" ? [] : [4 * ratio, 3 * ratio]);
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, low);
    pen.stroke();
    drawLabel(event.kind, x);
  } }
  for (const [step, text] of divergences) {
    pen.setLineDash([2 * ratio, 2 * ratio]);
    const x = locate(shown()[0], step);
    if (x === null) continue;
    pen.strokeStyle = pen.fillStyle = colour("text");
    pen.lineWidth = 1.4 * ratio;
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + bbox.height);
    pen.stroke();
    drawLabel(text, x);
  }
  pen.restore();
};
