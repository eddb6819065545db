"use strict";
// Draws the report from the JSON in #data. Texts of models enter the page as text nodes only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const COLOURS = ["#3b82f6", "#ef7d3b", "#22a06b", "#c0559b", "#a17c16", "#06a3b7", "#8b6cf0", "#dc4c64"];
  const STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((one) => [one, 2 * one, 5 * one]); // between marks of an axis
  const PAGE = 20; // completions that one click adds to the list, by whole groups
  const several = data.runs.length > 1;
  const narrow = innerWidth < 700;
  const colour = (index) => COLOURS[index % COLOURS.length];
  const drawn = []; // one function per chart, which draws it again
  let axis = "step"; // or "minutes"

  function el(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children.flat().filter((child) => child != null)); // strings become text nodes
    return node;
  }
  const faint = (...children) => el("p", { className: "faint" }, ...children);
  const swatch = (paint) => {
    const node = el("span", { className: "swatch" });
    node.style.background = paint;
    return node;
  };
  const label = (i) => (several ? [swatch(colour(i)), data.runs[i].name] : []);
  /** Three digits, at most nine characters: a longer label of an axis would be cut. */
  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0*e\+?/, "e") : String(Number(value.toPrecision(3)));
  }
  const signed = (value) => (value == null ? "–" : (value > 0 ? "+" : "") + number(value));
  const distinct = (values) => [...new Set(values)].sort((a, b) => (a > b) - (a < b));
  const average = (values) => values.reduce((a, b) => a + b, 0) / (values.length || 1);
  function groupBy(items, key) {
    const found = new Map();
    for (const item of items) found.has(key(item)) ? found.get(key(item)).push(item) : found.set(key(item), [item]);
    return found;
  }
  const metrics = distinct(data.runs.flatMap((run) => Object.keys(run.logs)));

  const heldOut = metrics.filter((name) => /^eval_(.*_)?reward$/.test(name)).sort((a, b) => (b === "eval_reward") - (a === "eval_reward"));
  const rows = data.completions;

  function section(title, ...notes) {
    const body = el("div");
    page.append(el("section", {}, el("h2", {}, title), notes.filter(Boolean).map((note) => faint(note)), body));
    return body;
  }
  /** A section of charts, which goes again if nothing is drawn in it. */
  function charts(title, note, fill) {
    const body = section(title, note);
    body.className = "grid";
    fill(body);
    if (!body.firstChild) body.parentElement.remove();
  }

  // Charts

  /** Points of a metric in a run without missing values; of two logs of one step the later one. */
  function points(run, name, spread = null) {
    const found = new Map();
    (run.logs[name] || []).forEach((value, i) => {
      const x = axis === "step" ? run.step[i] : run.minutes[i];
      if (value != null && x != null) found.set(x, [value, run.logs[spread]?.[i] ?? 0]);
    });
    const x = [...found.keys()].sort((a, b) => a - b);
    return { x, y: x.map((at) => found.get(at)[0]), spread: x.map((at) => found.get(at)[1]) };
  }
  /** Minutes at a step; those of a step without a log are interpolated. */
  function minutesAt(run, step) {
    const logs = (run.timed ||= run.step.map((at, i) => [at, run.minutes[i]]).filter(([, minutes]) => minutes != null));
    const next = logs.findIndex(([at]) => at >= step);
    if (next <= 0) return next ? logs[logs.length - 1]?.[1] ?? null : logs[0][1];
    const [[a, from], [b, to]] = [logs[next - 1], logs[next]];
    return from + ((to - from) * (step - a)) / (b - a || 1);
  }
  /** A step on the horizontal axis. */
  function place(run, step) {
    if (axis === "step") return step;
    const known = (run.places ||= new Map());
    if (!known.has(step)) known.set(step, minutesAt(run, step));
    return known.get(step);
  }
  const extents = {};
  /** First and last value of the horizontal axis, which all charts share, so that a step is at one place in all. */
  function extent() {
    const xs = () => data.runs.flatMap((run) => [...(axis === "step" ? run.step : run.minutes), ...run.rates.step.map((step) => place(run, step))]);
    const ends = (known) => known.slice(0, 1).concat(known.slice(-1));
    return (extents[axis] ||= ends(distinct(xs().filter((x) => x != null))));
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  /** Values from 0 on, so that a small change looks small; shares and rewards of 0 to 1 on that scale. */
  function vertical(low, high, unit) {
    if (low == null || low === high && low === 0) return [0, 1];
    if (unit && low >= 0 && high <= 1) return [0, 1];
    const margin = 0.05 * (high - low || Math.abs(high));
    return [low >= 0 ? 0 : low - margin, high <= 0 ? 0 : high + margin];
  }
  /**
   * Draw lines into a box; cursors and enlarged parts of all charts move together, a click opens the groups of a step.
   * lines(): [{label, colour, x, y, low, high, dash, value}], called again when the axis changes; low and high are a band,
   * value() is shown in place of y.
   */
  function chart(parent, title, lines, { height = 180, note = "", y = null, unit = false, under = null, values = null, status = null, run = null } = {}) {
    const box = parent.appendChild(el("div", { className: "box chart" }, el("h3", {}, title), note && faint(note)));
    const width = () => Math.max(box.clientWidth - 24, 100); // hidden: 0
    let plot = null;
    const draw = () => {
      if (plot) plot.destroy();
      // Without a cursor the legend has the last values.
      const text = (scaled = (value) => value) => (u, value, series, at) => {
        const shown = at == null ? [...u.data[series]].reverse().find((one) => one != null) : value;
        return number(shown == null ? null : scaled(shown));
      };
      const tables = [[extent()]], series = [{ label: axis, value: text() }], bands = [];
      for (const line of lines().filter((one) => one.x.length)) {
        const one = { label: line.label, stroke: line.colour, width: 2, spanGaps: true, dash: line.dash, points: { show: line.x.length < 40 }, value: text(line.value) };
        tables.push([line.x, line.y]);
        series.push(one);
        if (line.low) {
          bands.push({ series: [series.length + 1, series.length], fill: line.colour + "33" });
          for (const edge of [line.low, line.high]) {
            tables.push([line.x, edge]);
            series.push({ ...one, class: "edge", width: 0.5, points: { show: false } });
          }
        }
      }
      if (tables.length < 2) return;
      const grid = { stroke: () => css("--faint"), width: 0.2 };
      const room = (u, marks) => Math.max(44, 20 + Math.max(0, ...(marks || []).map((mark) => 7 * mark.length)));
      const axes = [
        { stroke: () => css("--faint"), grid, ticks: grid, size: 32, ...(axis === "step" ? { incrs: STEPS } : {}) },
        { stroke: () => css("--faint"), grid, ticks: grid, size: room, values: (_, marks) => marks.map(number), ...values },
      ];
      plot = new uPlot({ width: width(), height, series, bands, axes,
        cursor: { y: false, sync: { key: "x", scales: ["x", null] } },
        scales: { x: { time: false }, y: { range: y || ((_, low, high) => vertical(low, high, unit)) } },
        hooks: { ...(under ? { drawClear: [under] } : {}), ...(status ? { setCursor: [status] } : {}) } }, uPlot.join(tables), box);
      let down = 0;
      plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
      plot.over.addEventListener("click", (event) => {
        if (Math.abs(event.clientX - down) < 4) openAt(plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"), run);
      });
    };
    draw();
    drawn.push(draw);
    new ResizeObserver(() => plot && plot.setSize({ width: width(), height })).observe(box);
    return box;
  }

  /** One line per run; `spread` is a metric that is added and subtracted as a band. */
  const perRun = (name, spread = null) => () =>
    data.runs.map((run, i) => {
      const { x, y, spread: by } = points(run, name, spread);
      const band = spread && { low: y.map((v, k) => v - by[k]), high: y.map((v, k) => v + by[k]) };
      return { label: several ? run.name : name, colour: colour(i), x, y, ...band };
    });
  /** The healthy range, under the lines. */
  const healthy = ([low, high]) => (u) => {
    const clamp = (y) => Math.min(Math.max(y, u.bbox.top), u.bbox.top + u.bbox.height);
    const top = high == null ? u.bbox.top : clamp(u.valToPos(high, "y", true));
    const bottom = low == null ? u.bbox.top + u.bbox.height : clamp(u.valToPos(low, "y", true));
    u.ctx.fillStyle = "rgba(34, 160, 107, 0.14)";
    u.ctx.fillRect(u.bbox.left, top, u.bbox.width, bottom - top);
  };
  const boxes = new Map(); // of metrics with a chart
  const curves = new Map(); // from their values to the first metric that has them
  const folded = []; // [metric, its only value or the metric with the same curve]
  /** Draw a metric once; one that is constant, or equal to another, is listed at the end of the page. */
  function metric(parent, name, spread = null) {
    if (boxes.has(name) || !metrics.includes(name)) return;
    const ys = data.runs.map((run) => points(run, name).y), values = distinct(ys.flat()), key = JSON.stringify(ys);
    boxes.set(name, null);
    if (values.length < 2) return void folded.push([name, number(values[0])]);
    if (curves.has(key)) return void folded.push([name, `as ${curves.get(key)}`]);
    curves.set(key, name);
    const about = data.metrics[name] || {};
    const note = [about.meaning, about.healthy && `healthy: ${about.healthy}`].filter(Boolean).join(" · ");
    boxes.set(name, chart(parent, name, perRun(name, spread), { note, under: about.range && healthy(about.range) }));
  }

  // Sections

  const finite = (run, name) => (run.logs[name] || []).filter((value) => value != null);
  /**
   * Compare the means of the first and of the last fifth. Only more than two standard errors of their difference are a rise;
   * without `error` it is that of neighbours' differences, which a trend hardly changes, and unknown for less than four values.
   */
  function change(values, error = null) {
    const size = Math.max(1, Math.floor(values.length / 5));
    const before = average(values.slice(0, size)), after = average(values.slice(-size));
    const squares = values.slice(1).map((value, k) => (value - values[k]) ** 2);
    if (error === null && values.length > 3) error = Math.sqrt(average(squares) / size); // the variance of each mean is half of this square
    const verb = error === null || before === after ? "went" : Math.abs(after - before) <= 2 * error ? "stayed within its noise," : after > before ? "rose" : "fell";
    return { before, after, verb, text: `${verb} from ${number(before)} to ${number(after)}` };
  }
  /** Standard error of the difference of an evaluation's first and last mean reward, from the completions; null without them. */
  function evaluationError(run, mode) {
    const steps = groupBy(rows.text.keys(), (i) => (data.runs[rows.run[i]] === run && rows.mode[i] === mode && rows.total[i] != null ? rows.step[i] : null));
    steps.delete(null);
    const sides = distinct(steps.keys()).map((step) => steps.get(step).map((i) => rows.total[i])), ends = [sides[0], sides[sides.length - 1]];
    if (sides.length < 2 || Math.min(...ends.map((side) => side.length)) < 2) return null;
    return Math.sqrt(ends.map((side) => average(side.map((value) => (value - average(side)) ** 2)) / (side.length - 1)).reduce((a, b) => a + b));
  }
  /** Metrics with a healthy range; "is" and "was" are about the means of the last and of the first fifth, so that no single log decides. */
  const checks = data.runs.flatMap((run, i) => metrics.filter((name) => data.metrics[name]?.range && finite(run, name).length).map((name) => {
    const [low, high] = data.metrics[name].range, values = finite(run, name), { before, after } = change(values);
    const outside = (value) => (low != null && value < low) || (high != null && value > high);
    return { run, i, name, last: values[values.length - 1], outside: values.filter(outside).length, logs: values.length, was: outside(before), is: outside(after) };
  }));

  /**
   * A run in one sentence: what its rewards did, and what to read first. That is a held-out reward that fell, a metric that has left its
   * healthy range, then the hardest groups. A metric that was outside from the beginning comes before these only if no reward rose.
   */
  function verdict(run, i) {
    const held = heldOut.find((name) => finite(run, name).length), changes = {};
    if (held && finite(run, held).length > 1)
      changes["held-out reward"] = change(finite(run, held), finite(run, held).length > 3 ? null : evaluationError(run, held.replace(/_reward$/, "")));
    if (finite(run, "reward").length > 1) changes["training reward"] = change(finite(run, "reward"));
    const text = Object.entries(changes).map(([kind, one]) => `${kind} ${one.text}`).join(" and ") || "no reward was logged twice";
    const minutes = run.minutes.filter((value) => value != null).pop();
    const fell = changes["held-out reward"]?.verb === "fell", rose = Object.values(changes).some((one) => one.verb === "rose");
    const { step, counts, size } = run.rates, last = step[step.length - 1];
    const outside = checks.filter((check) => check.run === run && check.is && !(check.was && rose && step.length)).sort((a, b) => a.was - b.was)[0];
    const show = (name) => () => {
      const box = boxes.get(name) || healthBox, folded = box.closest("details");
      if (folded) folded.open = true;
      box.scrollIntoView({ block: "center" });
    };
    let first = null;
    if (fell) first = ["the held-out reward", show(held)];
    else if (outside) first = [`${outside.name}, which is outside its healthy range (${number(outside.last)})`, show(outside.name)];
    else if (step.length) {
      const row = counts[counts.length - 1], right = row.findIndex((count) => count);
      const which = data.right.binary ? `${right} of ${size} right` : "the lowest mean reward";
      first = [`the ${row[right] > 1 ? `${row[right]} groups` : "group"} of step ${last} with ${which}`, () => openStep(last, i)];
    }
    const link = first && el("a", { href: "#", onclick: (event) => { event.preventDefault(); first[1](); } }, first[0]);
    const steps = run.step[run.step.length - 1] ?? last ?? 0;
    return [`${text[0].toUpperCase()}${text.slice(1)} in ${steps} step${steps === 1 ? "" : "s"}${minutes ? ` (${number(minutes)} minutes)` : ""}`,
      ...(link ? ["; look first at ", link, "."] : ["."])];
  }

  function overview() {
    page.append(el("h1", {}, several ? `${data.runs.length} runs` : data.runs[0].name));
    const kind = data.runs.every((run) => finite(run, "eval_reward").length) ? ["eval_reward", "held-out"] : ["reward", "training"];
    const rewards = data.runs.map((run) => finite(run, kind[0]).pop() ?? -Infinity), best = rewards.indexOf(Math.max(...rewards));
    if (several && rewards[best] > -Infinity)
      page.append(el("p", { className: "verdict" }, `${data.runs[best].name} ends with the highest ${kind[1]} reward, ${number(rewards[best])}.`));
    page.append(el("div", { className: several ? "grid" : "" }, data.runs.map((run, i) => {
      const about = [run.model, `${run.completions} completions`, run.checkpoints.length && `checkpoints of steps ${run.checkpoints.join(", ")}`];
      return el("div", { className: several ? "box" : "" }, several ? el("h3", {}, ...label(i)) : null,
        el("p", { className: several ? "" : "verdict" }, verdict(run, i)), faint(about.filter(Boolean).join(" · ")));
    })));
  }

  function rewards() {
    const names = ["reward", ...heldOut].filter((name) => metrics.includes(name));
    const lines = () => names.flatMap((name, k) => data.runs.map((run, i) => {
      const { x, y } = points(run, name);
      const kind = name === "reward" ? "training" : name === "eval_reward" ? "held out" : name;
      return { label: several ? `${run.name}, ${kind}` : kind, colour: colour(several ? i : k), dash: k ? [6, 4] : undefined, x, y };
    }));
    const choice = el("select", { ariaLabel: "horizontal axis", onchange: () => { axis = choice.value; drawn.forEach((draw) => draw()); } },
      el("option", { value: "step" }, "by step"), el("option", { value: "minutes" }, "by minutes"));
    if (!names.length) return;
    const box = chart(page, "Reward", lines, { height: narrow ? 150 : 260, unit: true });
    for (const name of names) {
      boxes.set(name, box);
      curves.set(JSON.stringify(data.runs.map((run) => points(run, name).y)), name);
    }
    box.querySelector("h3").append(" ", choice);
  }

  /** Groups by step and number of right completions. */
  function rates(run, i) {
    const { step, counts, size } = run.rates, { name, low, high, binary } = data.right;
    if (!step.length) return;
    const status = faint();
    const idle = narrow ? "a tap opens the groups of a step" : "A column per step; a stronger colour: more of its groups. A click opens the groups of a step below.";
    const nearest = (x) => step.reduce((best, at, k) => (Math.abs(place(run, at) - x) < Math.abs(place(run, step[best]) - x) ? k : best), 0);
    const scaled = (level) => (binary ? level : low + ((high - low) * level) / size);
    const of = (level) => (binary ? `${level} of ${size} right` : `a mean reward near ${number(scaled(level))}`);
    const cells = (u) => {
      const edge = (x) => Math.min(Math.max(u.valToPos(x, "x", true), u.bbox.left), u.bbox.left + u.bbox.width);
      const xs = step.map((at) => place(run, at));
      xs.forEach((x, k) => {
        const before = k ? x - xs[k - 1] : (xs[1] ?? x + 1) - x, after = k + 1 < xs.length ? xs[k + 1] - x : before;
        const left = edge(x - before / 2), right = edge(x + after / 2);
        const total = counts[k].reduce((a, b) => a + b, 0);
        counts[k].forEach((count, level) => {
          const top = u.valToPos(level + 0.5, "y", true), bottom = u.valToPos(level - 0.5, "y", true);
          u.ctx.fillStyle = colour(i) + Math.round(40 + (215 * count) / total).toString(16);
          if (count) u.ctx.fillRect(left, top, Math.max(right - left - (right - left > 6 ? 1 : 0), 1), bottom - top - 1);
        });
      });
    };
    const mean = () => [{ label: binary ? `mean, of ${size} right` : "mean", value: scaled, colour: css("--ink"), x: step.map((at) => place(run, at)),
      y: counts.map((row) => row.reduce((a, count, level) => a + count * level, 0) / row.reduce((a, b) => a + b, 0)) }];
    const show = (u) => {
      const { left, top } = u.cursor, k = left >= 0 ? nearest(u.posToVal(left, "x")) : -1;
      const level = Math.round(u.posToVal(top, "y"));
      const total = counts[k]?.reduce((a, b) => a + b, 0);
      status.textContent = k < 0 ? idle : `step ${step[k]}: ${counts[k][level] ? `${counts[k][level]} of ` : ""}${total} groups${counts[k][level] ? ` with ${of(level)}` : ""}`;
    };
    const ticks = { splits: () => [...new Set([0, 1, 2, 3, 4].map((k) => Math.round((size * k) / 4)))], values: (_, marks) => marks.map((mark) => number(scaled(mark))) };
    const title = `${several ? `${run.name}: ` : ""}Solve rates: ${binary ? `right of ${size}` : "mean reward of a group"}${name ? ` (${name})` : ""}`;
    const box = chart(page, title, mean, { height: narrow ? 120 : 190, y: () => [-0.5, size + 0.5], under: cells, values: ticks, status: show, run: i });
    box.classList.add("rates");
    box.append(status);
    status.textContent = idle;
  }

  let healthBox = null;
  function health() {
    if (!checks.length) return;
    checks.sort((a, b) => b.is - a.is || b.outside / b.logs - a.outside / a.logs);
    const card = ({ name, i, last, is, outside, logs }) => el("div", { className: "box" },
      el("div", { className: "row" }, el("strong", { className: "tag" }, name), el("span", { className: "faint" }, ...label(i)),
        el("span", { className: is ? "bad" : "good" }, `last ${number(last)}`)),
      el("p", {}, `healthy: ${data.metrics[name].healthy}; outside in ${outside} of ${logs} logs`),
      outside ? faint(data.metrics[name].otherwise) : null);
    const body = (healthBox = section("Healthy ranges", "Rules of thumb for runs that learn, not limits."));
    const grid = (found) => el("div", { className: "grid" }, found.map(card));
    const outside = checks.filter((check) => check.outside), inside = checks.filter((check) => !check.outside);
    body.append(outside.length ? grid(outside) : el("p", { className: "good" }, "Every log was inside."));
    if (inside.length) body.append(el("details", {}, el("summary", {}, `${inside.length} always inside`), grid(inside)));
  }

  function allCurves() {
    const evaluated = metrics.filter((name) => /^eval_(.*_)?((rewards\/.+\/)?(pass|maj|avg)@\d+)$/.test(name));
    charts("Curves", "The healthy range is green. Drag over a chart to enlarge a part of all charts; a double click shows them whole.", (grid) => {
      for (const name of evaluated) metric(grid, name, metrics.includes(`${name}_ci95`) ? `${name}_ci95` : null);
      for (const name of metrics) if (/^rewards\/.+\/mean$/.test(name)) metric(grid, name);
      for (const name of ["completions/mean_length", "completions/clipped_ratio", "entropy", "grad_norm", "loss", "kl", "frac_reward_zero_std"]) metric(grid, name);
    });
    charts("Mismatch and clipping", "", (grid) => {
      for (const name of ["sampling/logprob_mismatch", "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean",
        "sampling/truncated_mass/mean", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio"]) metric(grid, name);
    });
  }

  /** One chart for each metric by value of a column, such as reward/maths and reward/code, with a line for each value. */
  function byValue() {
    const parts = (name) => name.match(/^((?:eval_(?:.*_)?)?(?:reward|frac_reward_zero_std|entropy|completions\/mean_length|completions\/clipped_ratio|(?:pass|maj|avg)@\d+))\/(.+)$/);
    charts("By source", "", (grid) => groupBy(metrics.filter((name) => !data.metrics[name] && parts(name)), (name) => parts(name)[1]).forEach((names, base) => {
      const lines = () => data.runs.flatMap((run, i) => names.map((name, k) => {
        const { x, y } = points(run, name);
        return { label: `${several ? `${run.name} · ` : ""}${parts(name)[2]}`, colour: colour(k), dash: i ? [10 - 2 * (i % 4), 4] : undefined, x, y };
      }));
      const about = data.metrics[base] || {}, box = chart(grid, `${base} by source`, lines, { note: about.meaning, under: about.range && healthy(about.range) });
      names.forEach((name) => boxes.set(name, box));
    }));
  }

  /** Seconds or gigabytes by phase: a bar of the means, and a stacked chart or lines over the run. */
  function phases(prefix, title, unit, stacked) {
    const names = metrics.filter((name) => name.startsWith(prefix) && !name.slice(prefix.length).includes("/"));
    if (!names.length) return;
    const body = section(title);
    body.className = "grid";
    names.forEach((name) => boxes.set(name, null));
    data.runs.forEach((run, i) => {
      const means = names.map((name) => points(run, name).y).map((y) => y.reduce((a, b) => a + b, 0) / (y.length || 1));
      const total = means.reduce((a, b) => a + b, 0);
      const parts = means.map((mean, k) => {
        const part = el("span", { title: `${names[k]} ${number(mean)} ${unit}` });
        part.style.cssText = `background: ${colour(k)}; width: ${stacked ? (100 * mean) / total : 0}%`;
        return part;
      });
      const shown = means.map((mean, k) => el("span", {}, swatch(colour(k)),
        `${names[k].slice(prefix.length)} ${number(mean)} ${unit}${stacked ? ` (${Math.round((100 * mean) / total)} %)` : ""}`));
      const box = chart(body, several ? run.name : stacked ? "seconds of a step, phases on top of each other" : title, () => {
        let below = null;
        return names.map((name, k) => {
          const { x, y } = points(run, name);
          if (stacked && below) y.forEach((_, at) => (y[at] += below.get(x[at]) ?? 0));
          if (stacked) below = new Map(x.map((at, j) => [at, y[j]]));
          return { label: name.slice(prefix.length), colour: colour(k), x, y };
        });
      }, { run: i });
      box.querySelector("h3").after(stacked ? el("div", { className: "bar" }, parts) : "", el("div", { className: "row faint" }, shown));
    });
    if (stacked) for (const name of ["tokens_per_second", "mfu"]) metric(body, name);
  }

  // Completions

  const where = (i) => [several ? data.runs[rows.run[i]].name : null, rows.mode[i] === "train" ? null : rows.mode[i], `step ${rows.step[i]}`]
    .filter(Boolean).join(" · ");
  function scores(i) {
    const parts = Object.entries(rows.rewards).filter(([, values]) => values[i] != null).map(([name, values]) => `${name} ${number(values[i])}`);
    const advantage = rows.mode[i] === "train" && el("span", { className: rows.advantage[i] > 0 ? "good" : rows.advantage[i] < 0 ? "bad" : "" }, `advantage ${signed(rows.advantage[i])}`);
    return el("div", { className: "row faint" }, parts.join(" · "), advantage || null);
  }
  const prompt = (index) => el("details", { className: "prompt" }, el("summary", {}, data.prompts[index].slice(-160).trim() || "(empty prompt)"),
    el("pre", {}, data.prompts[index]));
  /** Completions of one prompt of a step, in the order of the file. */
  const groups = [...groupBy(rows.text.keys(), (i) => [rows.run[i], rows.mode[i], rows.step[i], rows.prompt[i]].join()).values()];
  const reward = (members) => average(members.map((i) => rows.total[i] ?? 0));
  function group(members) {
    const sorted = [...members].sort((a, b) => (rows.total[b] ?? -Infinity) - (rows.total[a] ?? -Infinity) || rows.advantage[b] - rows.advantage[a]);
    return el("article", { className: "box" }, el("div", { className: "row" }, el("strong", {}, where(members[0])),
      members.length > 1 ? el("span", {}, `${members.length} completions, mean ${number(reward(members))}`) : null),
      prompt(rows.prompt[members[0]]), sorted.map((i) => el("div", { className: "completion" }, scores(i),
        el("pre", {}, rows.text[i] || "(empty completion)"), rows.extra[i] ? faint(rows.extra[i]) : null)));
  }

  /** The text with the words marked that `other` does not contain. */
  function marked(text, other) {
    const known = new Set(other.split(/\s+/));
    return text.split(/(\s+)/).map((word) => (word.trim() && !known.has(word) ? el("mark", {}, word) : word));
  }

  function changed() {
    if (!data.changed.length) return;
    const body = section("Completions that changed most", "Prompts that were sampled at several steps: the first and the last time, " +
      "each the completion with the median reward. Words that the other one lacks are marked.");
    const later = el("details", {}, el("summary", {}, `${data.changed.length - 5} more`));
    data.changed.forEach(({ first, last, change }, index) => {
      const side = (i, other) => el("div", {}, el("strong", {}, where(i)), scores(i), el("pre", {}, marked(rows.text[i], rows.text[other])));
      (index < 5 ? body : later).append(el("div", { className: "box" }, prompt(rows.prompt[first]),
        faint(`mean reward ${signed(change)}`), el("div", { className: "pair" }, side(first, last), side(last, first))));
    });
    if (data.changed.length > 5) body.append(later);
  }

  let showPrompt = () => {}, openStep = () => {};
  const openAt = (x, i) => {
    const runs = data.runs.map((_, k) => k).filter((k) => (i == null || k === i) && groups.some(([one]) => rows.run[one] === k && rows.mode[one] === "train"));
    const steps = runs.flatMap((k) => distinct(rows.step.filter((_, one) => rows.run[one] === k && rows.mode[one] === "train")).map((step) => [Math.abs(place(data.runs[k], step) - x), step]));
    if (steps.length) openStep(steps.reduce((a, b) => (b[0] < a[0] ? b : a))[1], i);
  };

  function withoutGradient() {
    const equal = groups.filter((members) => rows.mode[members[0]] === "train" && members.length > 1);
    if (!equal.length) return;
    const none = (members) => members.every((i) => Math.abs(rows.advantage[i]) < 1e-8);
    const body = section("Prompts without a gradient", "All completions of a group had the same reward, so that no advantage was left: too easy, or too hard.");
    data.runs.forEach((run, i) => {
      const mine = equal.filter(([one]) => rows.run[one] === i), lost = mine.filter(none);
      const byPrompt = [...groupBy(lost, ([one]) => rows.prompt[one])].sort((a, b) => b[1].length - a[1].length).slice(0, PAGE);
      if (!mine.length) return;
      body.append(el("div", { className: "box" }, several ? el("h3", {}, ...label(i)) : null, el("p", {}, `${lost.length} of ${mine.length} groups`),
        byPrompt.length ? el("details", {}, el("summary", {}, `${byPrompt.length} prompts with most of them`), byPrompt.map(([index, found]) =>
          el("div", {}, prompt(index), el("p", { className: "row faint" },
            `${found.length} of ${mine.filter(([one]) => rows.prompt[one] === index).length} times, mean reward ${number(average(found.map(reward)))}`,
            el("button", { onclick: () => showPrompt(index) }, "completions"))))) : null));
    });
  }

  function browser() {
    if (!rows.text.length) return void page.append(faint("log_completions=True would add solve rates and the groups of every step."));
    const body = section("Completions", data.omitted ? `${rows.text.length} of ${rows.text.length + data.omitted} logged completions, in evenly spaced groups.` : "");
    const list = el("div"), status = faint("");
    let chosen = null, found = [], shown = 0;
    const options = (values, all, text = String) => [all && el("option", { value: "" }, all), ...values.map((value) => el("option", { value }, text(value)))].filter(Boolean);
    const run = el("select", {}, options(distinct(rows.run), "all runs", (i) => data.runs[i].name));
    const mode = el("select", {}, options(distinct(rows.mode), "train and evaluation"));
    const step = el("select", {}, options(distinct(rows.step), "all steps", (at) => `step ${at}`));
    const order = el("select", {}, [["low", "lowest reward first"], ["high", "highest reward first"], ["", "as sampled"], ["long", "longest first"]]
      .map(([value, text]) => el("option", { value }, text)));
    const words = el("input", { type: "search", placeholder: "text" });
    const every = el("button", { onclick: () => { chosen = null; filter(); } }, "all prompts");
    const more = el("button", { onclick: () => grow() }, "more groups");
    function grow(least = PAGE) {
      for (let added = 0; added < least && shown < found.length; shown += 1) {
        list.append(group(found[shown]));
        added += found[shown].length;
      }
      more.hidden = shown >= found.length;
      status.textContent = `${shown} of ${found.length} groups`;
    }
    function filter() {
      const text = words.value.toLowerCase();
      const has = (i) => rows.text[i].toLowerCase().includes(text) || data.prompts[rows.prompt[i]].toLowerCase().includes(text);
      found = groups.filter(([i]) => (run.value === "" || rows.run[i] === Number(run.value)) && (mode.value === "" || rows.mode[i] === mode.value) &&
        (step.value === "" || rows.step[i] === Number(step.value)) && (chosen === null || rows.prompt[i] === chosen));
      if (text) found = found.map((members) => members.filter(has)).filter((members) => members.length);
      const length = (members) => Math.max(...members.map((i) => rows.text[i].length));
      if (order.value) found.sort((a, b) => (order.value === "low" ? reward(a) - reward(b) : order.value === "high" ? reward(b) - reward(a) : length(b) - length(a)));
      list.replaceChildren();
      every.hidden = chosen === null;
      shown = 0;
      grow();
    }
    const train = rows.mode.includes("train") ? "train" : "";
    const last = String(distinct(rows.step.filter((_, i) => !train || rows.mode[i] === train)).pop());
    for (const control of [run, mode, step, order]) control.onchange = filter;
    words.onchange = () => { if (words.value) step.value = mode.value = ""; filter(); };
    showPrompt = (index) => { chosen = index; step.value = ""; filter(); body.scrollIntoView(); };
    openStep = (at, i) => {
      chosen = null;
      words.value = "";
      [mode.value, step.value, run.value, order.value] = [train, String(at), i == null ? "" : String(i), "low"];
      filter();
      body.scrollIntoView({ block: "start" });
    };
    [mode.value, step.value] = [train, last];
    body.append(el("div", { className: "row" }, step, order, el("details", {}, el("summary", {}, "filter"),
      el("div", { className: "row" }, several ? run : null, mode, words, every)), status), list, more);
    filter();
  }

  function settings() {
    const entry = ([name, values]) => [el("dt", {}, name), values.map((value, i) => el("dd", {}, several ? swatch(colour(i)) : null, value ?? "–"))].flat();
    if (several) section("Settings that differ", data.differing.length ? "" : "None.").append(el("dl", {}, data.differing.flatMap(entry)));
    if (data.common.length) section("Settings").append(el("details", {}, el("summary", {}, `${data.common.length} settings${several ? " that all runs share" : ""}`),
      el("dl", {}, data.common.flatMap(entry))));
  }

  function others() {
    charts("Metrics of the run's own", "", (grid) => metrics.filter((name) => !data.metrics[name] && !name.startsWith("eval_")).forEach((name) => metric(grid, name)));
    const rest = metrics.filter((name) => !boxes.has(name)), grid = el("div", { className: "grid" }), list = el("dl");
    const details = el("details", {}, el("summary", {}, "further metrics"), grid);
    const same = el("details", {}, el("summary", {}, ""), list);
    const fill = () => {
      rest.forEach((name) => metric(grid, name));
      list.replaceChildren(...folded.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
      same.firstChild.textContent = `${folded.length} constant or equal to another`;
    };
    if (!metrics.length) return;
    const body = section("All other metrics");
    details.open = true; // charts need a width
    body.append(details, same);
    fill();
    details.open = false;
    details.firstChild.textContent = `${grid.childElementCount} further metrics`;
    details.hidden = !grid.childElementCount;
    same.hidden = !folded.length;
    if (details.hidden && same.hidden) body.parentElement.remove();
  }

  page.replaceChildren();
  overview();
  rewards();
  data.runs.forEach(rates);
  browser();
  health();
  allCurves();
  byValue();
  changed();
  withoutGradient();
  phases("time/", "Time by phase", "s", true);
  phases("memory/", "Memory by phase", "GB", false);
  settings();
  others();

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((draw) => draw()));
})();
