// What the modules of the page share: the runs, and the part of the x axis that the charts show.

import {View} from "./chart.js";

export const view = new View();
export const runs = [];
export const shown = () => runs.filter(run => run.isShown);
export const names = (run, prefix) => run.state.names.filter(name => name.startsWith(prefix));
export const points = () => Math.max(300, Math.min(1600, Math.round(document.getElementById("panels").clientWidth)));
// Query parameters of a request for lines.
export const query = () => ({axis: view.axis.name, points: points(),
  ...(view.range ? {from: view.range[0].toFixed(6), to: view.range[1].toFixed(6)} : {})});
