// The charts of all shown runs: which columns each draws, and how.

import {names} from "./state.js";
import {KINDS} from "./numbers.js";

const lines = (name, label) => run => run.series[name] ? [{label: label(run), colour: run.variable, ...run.series[name]}] : [];
const only = run => run.state.name;

// smooths: columns of which a moving average is drawn, if one is chosen
export const CHART_SPECS = [
  {title: "Loss", about: "nats per token, or the unit of the objective", y: "loss", labels: true, smooths: ["loss"], lines: run => [
    ...lines("loss", only)(run),
    ...names(run, "evaluations/").flatMap(name => lines(name, () => `${run.state.name}: ${name.slice(12).replaceAll("_", "-")}`)(run)
      .map(each => ({...each, line: true, dots: run.series[name].count > 60 ? 4 : 7}))),
  ], names: run => ["loss", ...names(run, "evaluations/")]},
  {title: "Gradient norm", about: "before clipping", y: "gradient norm", smooths: ["grad_norm"], lines: lines("grad_norm", only), names: () => ["grad_norm"]},
  {title: "Learning rate", about: "by parameter group", y: "learning rate", fromZero: true, lines: run => {
    const groups = names(run, "learning_rates/");
    return groups.length > 1 ? groups.slice(0, 6).flatMap((name, index) => lines(name, () => `${run.state.name}: ${name.slice(15)}`)(run).map(each => ({...each, dashed: index % 2 === 1})))
      : lines("learning_rate", only)(run);
  }, names: run => ["learning_rate", ...names(run, "learning_rates/").slice(0, 6)]},
  {title: "Tokens per second", about: "of all ranks", y: "tokens per second", kind: KINDS.short, smooths: ["tokens_per_second"], fromZero: true, lines: lines("tokens_per_second", only), names: () => ["tokens_per_second"]},
  {title: "Model FLOPs utilization", about: "fraction of the devices' peak", y: "MFU", kind: KINDS.percent, smooths: ["mfu"], fromZero: true, lines: lines("mfu", only), names: () => ["mfu"], needs: "mfu"},
  {title: "Exposed communication", about: "of rank 0, in measured steps", y: "time", kind: KINDS.seconds, fromZero: true,
    lines: lines("times/exposed_communication", only), names: () => ["times/exposed_communication"], needs: "times/exposed_communication"},
  {title: "Memory", about: "of rank 0; dashed: current", y: "memory", kind: KINDS.bytes, fromZero: true, lines: run => {
    const kind = run.state.names.includes("memory/allocated") ? "allocated" : "host";
    return [...lines(`memory/${kind}_peak`, () => `${run.state.name}: ${kind}, peak`)(run),
      ...lines(`memory/${kind}`, () => `${run.state.name}: ${kind}`)(run).map(each => ({...each, dashed: true}))];
  }, names: run => names(run, "memory/"), needs: "memory/"},
];
