"use strict";
// Draws the report from the JSON in #data. Texts of models enter the page as text nodes only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const COLOURS = ["#3b82f6", "#ef7d3b", "#22a06b", "#c0559b", "#a17c16", "#06a3b7", "#8b6cf0", "#dc4c64"];
  const PAGE = 20; // completions that one click adds to the list
  const several = data.runs.length > 1;
  const colour = (index) => COLOURS[index % COLOURS.length];
  const drawn = []; // one function per chart, which draws it again
  let axis = "step"; // or "minutes"

  function el(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children.filter((child) => child != null)); // strings become text nodes
    return node;
  }
  const faint = (...children) => el("p", { className: "faint" }, ...children);
  const swatch = (paint) => {
    const node = el("span", { className: "swatch" });
    node.style.background = paint;
    return node;
  };
  const number = (value) => (value == null ? "–" : String(Number(value.toPrecision(3))));
  const signed = (value) => (value == null ? "–" : (value > 0 ? "+" : "") + number(value));

  function section(title, ...notes) {
    const body = el("div");
    page.append(el("section", {}, el("h2", {}, title), ...notes.map((note) => faint(note)), body));
    return body;
  }

  // Charts

  /** Points of a metric in a run without missing values; of two logs of one step the later one. */
  function points(run, name, more = []) {
    const values = run.logs[name];
    const found = new Map();
    (values || []).forEach((value, i) => {
      const x = axis === "step" ? run.step[i] : run.minutes[i];
      if (value != null && x != null) found.set(x, [value, ...more.map((other) => run.logs[other]?.[i] ?? null)]);
    });
    const x = [...found.keys()].sort((a, b) => a - b);
    return { x, y: x.map((at) => found.get(at)[0]), more: more.map((_, k) => x.map((at) => found.get(at)[k + 1])) };
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  /**
   * Draw lines into a box.
   * lines(): [{label, colour, x, y, low, high}], called again when the axis changes; low and high are a band.
   */
  function chart(parent, title, lines, { range = null, note = "", zero = false } = {}) {
    const box = parent.appendChild(el("div", { className: "box chart" }, el("h3", {}, title), note && faint(note)));
    let plot = null;
    const draw = () => {
      if (plot) plot.destroy();
      const tables = [], series = [{ label: axis }], bands = [];
      for (const line of lines().filter((one) => one.x.length)) {
        const paint = line.colour;
        const one = { label: line.label, stroke: paint, width: 2, spanGaps: true, points: { show: line.x.length < 40 },
          value: (_, value) => number(value) };
        tables.push([line.x, line.y]);
        series.push(one);
        if (line.low) {
          bands.push({ series: [series.length + 1, series.length], fill: paint + "33" });
          for (const values of [line.low, line.high]) {
            tables.push([line.x, values]);
            series.push({ ...one, class: "edge", width: 0.5, points: { show: false } });
          }
        }
      }
      if (!tables.length) return;
      const grid = { stroke: () => css("--faint"), width: 0.2 };
      const axes = [
        { stroke: () => css("--faint"), grid, ticks: grid },
        { stroke: () => css("--faint"), grid, ticks: grid, size: 58, values: (_, marks) => marks.map(number) },
      ];
      const healthy = (u) => {
        const clamp = (y) => Math.min(Math.max(y, u.bbox.top), u.bbox.top + u.bbox.height);
        const [low, high] = range;
        const top = high == null ? u.bbox.top : clamp(u.valToPos(high, "y", true));
        const bottom = low == null ? u.bbox.top + u.bbox.height : clamp(u.valToPos(low, "y", true));
        u.ctx.fillStyle = "rgba(34, 160, 107, 0.14)";
        u.ctx.fillRect(u.bbox.left, top, u.bbox.width, bottom - top);
      };
      const width = box.clientWidth - 24;
      plot = new uPlot({ width, height: 200, series, bands, axes, scales: { x: { time: false }, y: zero ? { range: (_, low, high) => [0, high * 1.05] } : {} },
        hooks: range ? { drawClear: [healthy] } : {} }, uPlot.join(tables), box);
    };
    draw();
    drawn.push(draw);
    new ResizeObserver(() => plot && plot.setSize({ width: box.clientWidth - 24, height: 200 })).observe(box);
    return box;
  }

  const has = (name) => data.runs.some((run) => run.logs[name]);
  /** One line per run; `spread` is a metric that is added and subtracted as a band. */
  const perRun = (name, spread = null) => () =>
    data.runs.map((run, i) => {
      const { x, y, more } = points(run, name, spread && run.logs[spread] ? [spread] : []);
      const band = more.length && { low: y.map((v, k) => v - (more[0][k] ?? 0)), high: y.map((v, k) => v + (more[0][k] ?? 0)) };
      return { label: several ? run.name : name, colour: colour(i), x, y, ...band };
    });
  const charted = new Set();
  function metric(parent, name, spread = null, title = name) {
    if (!has(name)) return;
    charted.add(name);
    const about = data.metrics[name] || {};
    const range = about.range || null;
    const note = [about.meaning, about.healthy && `healthy: ${about.healthy}`].filter(Boolean).join(" · ");
    chart(parent, title, perRun(name, spread), { range, note });
  }

  // Sections

  function overview() {
    page.append(el("h1", {}, several ? `${data.runs.length} runs` : data.runs[0].name));
    const grid = page.appendChild(el("div", { className: "grid" }));
    data.runs.forEach((run, i) => {
      const { y } = points(run, "reward");
      const reward = y.length ? `reward ${number(y[0])} in the first log, ${number(y[y.length - 1])} in the last` : "no rewards logged";
      const minutes = run.minutes.filter((value) => value != null);
      const time = minutes.length ? ` in ${number(minutes[minutes.length - 1])} minutes` : "";
      const steps = run.step.length ? run.step[run.step.length - 1] : 0;
      grid.append(el("div", { className: "box" }, el("h3", {}, swatch(colour(i)), run.name),
        el("p", {}, `${steps} steps${time}: ${reward}`),
        faint(run.model ? `${run.model}. ` : "", `${run.completions} completions`,
          run.checkpoints.length ? `, checkpoints of steps ${run.checkpoints.join(", ")}` : "")));
    });
    const choice = el("select", { onchange: () => { axis = choice.value; drawn.forEach((draw) => draw()); } },
      el("option", { value: "step" }, "step"), el("option", { value: "minutes" }, "minutes since the first log"));
    page.append(el("p", {}, el("label", {}, "Horizontal axis of the charts: ", choice)));
  }

  function health() {
    const rows = [];
    data.runs.forEach((run, i) => {
      for (const [name, about] of Object.entries(data.metrics)) {
        const { x, y } = points(run, name);
        if (!about.range || !y.length) continue;
        const [low, high] = about.range;
        const outside = y.map((value) => (low != null && value < low) || (high != null && value > high));
        const count = outside.filter(Boolean).length;
        rows.push({ run, i, name, about, last: y[y.length - 1], bad: outside[y.length - 1], count, total: x.length });
      }
    });
    if (!rows.length) return;
    rows.sort((a, b) => b.bad - a.bad || b.count / b.total - a.count / a.total);
    const card = (row) => el("div", { className: "box" },
      el("div", { className: "row" }, several && swatch(colour(row.i)) || null, el("strong", { className: "tag" }, row.name),
        several ? el("span", { className: "faint" }, row.run.name) : null,
        el("span", { className: row.bad ? "bad" : "good" }, `last ${number(row.last)}`)),
      el("p", {}, `healthy: ${row.about.healthy}; outside in ${row.count} of ${row.total} logs`),
      row.count ? faint(row.about.otherwise) : null);
    const body = section("Beside the healthy range", "Ranges are rules of thumb for runs that learn, not limits.");
    const grid = (found) => el("div", { className: "grid" }, ...found.map(card));
    const outside = rows.filter((row) => row.count), inside = rows.filter((row) => !row.count);
    body.append(outside.length ? grid(outside) : el("p", { className: "good" }, "Every log was inside."));
    if (inside.length) body.append(el("details", {}, el("summary", {}, `${inside.length} always inside`), grid(inside)));
  }

  function curves() {
    const grid = section("Curves", "Drag over a chart to enlarge a part; a double click shows all of it again.");
    grid.className = "grid";
    metric(grid, "reward", "reward_std", "reward, ± standard deviation within groups");
    if (data.runs.some((run) => run.groups.step.length))
      chart(grid, "mean reward of a group: median and the middle 80 % of groups", () =>
        data.runs.map((run, i) => {
          const { step, low, median, high } = run.groups;
          const x = axis === "step" ? step : step.map((at) => run.minutes[run.step.findIndex((one) => one >= at)] ?? null);
          const kept = x.map((_, k) => k).filter((k) => x[k] != null && x[k] !== x[k - 1]);
          const pick = (values) => kept.map((k) => values[k]);
          return { label: several ? run.name : "median", colour: colour(i), x: pick(x), y: pick(median), low: pick(low), high: pick(high) };
        }), { note: "from the completions that were logged" });
    const evaluated = [...new Set(data.runs.flatMap((run) => Object.keys(run.logs)))]
      .filter((name) => /^eval_(.*_)?(reward|(rewards\/.+\/)?(pass|maj|avg)@\d+)$/.test(name));
    for (const name of evaluated) metric(grid, name, has(`${name}_ci95`) ? `${name}_ci95` : null);
    for (const name of ["completions/mean_length", "entropy", "grad_norm", "loss"]) metric(grid, name);
    const components = section("Reward components", "Mean ± standard deviation over the completions.");
    components.className = "grid";
    const rewards = new Set(data.runs.flatMap((run) => Object.keys(run.logs)).filter((name) => /^rewards\/.+\/mean$/.test(name)));
    for (const name of rewards) metric(components, name, name.replace(/mean$/, "std"));
    const trust = section("Mismatch, truncation and clipping", "The healthy range is green.");
    trust.className = "grid";
    for (const name of ["sampling/logprob_mismatch", "sampling/sampling_logp_difference/mean",
      "sampling/importance_sampling_ratio/mean", "sampling/truncated_mass/mean", "completions/clipped_ratio",
      "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio", "kl",
      "frac_reward_zero_std"]) metric(trust, name);
  }

  /** Seconds or gigabytes by phase: a bar of the means, and a stacked chart or lines over the run. */
  function phases(prefix, title, unit, stacked) {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.logs)))]
      .filter((name) => name.startsWith(prefix) && !name.slice(prefix.length).includes("/"));
    if (!names.length) return;
    const body = section(title);
    body.className = "grid";
    names.forEach((name) => charted.add(name));
    data.runs.forEach((run) => {
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
      }, { zero: true });
      box.querySelector("h3").after(stacked ? el("div", { className: "bar" }, ...parts) : "", el("div", { className: "row faint" }, ...shown));
    });
    if (stacked) for (const name of ["step_time", "tokens_per_second", "mfu"]) metric(body, name);
  }

  // Completions

  const rows = data.completions;
  const where = (i) => [several ? data.runs[rows.run[i]].name : null, rows.mode[i] === "train" ? null : rows.mode[i], `step ${rows.step[i]}`]
    .filter(Boolean).join(" · ");
  function scores(i) {
    const parts = Object.entries(rows.rewards).filter(([, values]) => values[i] != null).map(([name, values]) => `${name} ${number(values[i])}`);
    return [...parts, rows.mode[i] === "train" ? `advantage ${signed(rows.advantage[i])}` : null].filter(Boolean).join(" · ");
  }
  const prompt = (index) => el("details", {}, el("summary", {}, data.prompts[index].slice(-160).trim() || "(empty prompt)"),
    el("pre", {}, data.prompts[index]));
  function completion(i) {
    return el("article", { className: "box" }, el("div", { className: "row" }, el("strong", {}, where(i)), el("span", { className: "faint" }, scores(i))),
      prompt(rows.prompt[i]), el("pre", {}, rows.text[i] || "(empty completion)"), rows.extra[i] ? faint(rows.extra[i]) : null);
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
    data.changed.forEach(({ first, last, change }, place) => {
      const side = (i, other) => el("div", {}, el("div", { className: "row" }, el("strong", {}, where(i)), el("span", { className: "faint" }, scores(i))),
        el("pre", {}, ...marked(rows.text[i], rows.text[other])));
      (place < 5 ? body : later).append(el("div", { className: "box" }, prompt(rows.prompt[first]),
        faint(`mean reward ${signed(change)}`), el("div", { className: "pair" }, side(first, last), side(last, first))));
    });
    if (data.changed.length > 5) body.append(later);
  }

  let showPrompt = () => {};
  function withoutGradient() {
    if (!data.runs.some((run) => run.without_gradient.groups)) return;
    const body = section("Groups without a gradient", "All completions of the group had the same reward, so that no advantage and no gradient was left.");
    data.runs.forEach((run, i) => {
      const { groups, equal, best, worst, prompts } = run.without_gradient;
      if (!groups) return;
      const box = body.appendChild(el("div", { className: "box" }, several ? el("h3", {}, swatch(colour(i)), run.name) : null,
        el("p", {}, `${equal} of ${groups} logged groups: ${best} with the highest reward of the run (too easy), ` +
          `${worst} with the lowest (too hard), ${equal - best - worst} between.`)));
      if (!prompts.length) return;
      box.append(el("details", {}, el("summary", {}, `${prompts.length} prompts that did it most often`), ...prompts.map(([index, times, seen, reward]) =>
        el("div", {}, prompt(index), el("p", { className: "row faint" }, `${times} of ${seen} times, mean reward ${number(reward)}`,
          el("button", { onclick: () => showPrompt(index) }, "completions"))))));
    });
  }

  function browser() {
    if (!rows.text.length) return;
    const body = section("Completions", data.omitted ? `${rows.text.length} of ${rows.text.length + data.omitted} logged completions, evenly spaced.` : "");
    const list = el("div"), status = faint("");
    let chosen = null, found = [], shown = 0;
    const options = (values, all, label = String) => [el("option", { value: "" }, all), ...values.map((value) => el("option", { value }, label(value)))];
    const distinct = (values) => [...new Set(values)].sort((a, b) => (a > b) - (a < b));
    const run = el("select", {}, ...options(distinct(rows.run), "all runs", (i) => data.runs[i].name));
    const mode = el("select", {}, ...options(distinct(rows.mode), "train and evaluation"));
    const step = el("select", {}, ...options(distinct(rows.step), "all steps", (at) => `step ${at}`));
    const order = el("select", {}, ...[["", "as sampled"], ["high", "highest reward"], ["low", "lowest reward"], ["long", "longest"]]
      .map(([value, text]) => el("option", { value }, text)));
    const words = el("input", { type: "search", placeholder: "text" });
    const every = el("button", { onclick: () => { chosen = null; filter(); } }, "all prompts");
    const more = el("button", { onclick: () => grow() }, `${PAGE} more`);
    function grow() {
      const next = found.slice(shown, shown + PAGE);
      list.append(...next.map(completion));
      shown += next.length;
      more.hidden = shown >= found.length;
      status.textContent = `${shown} of ${found.length}`;
    }
    function filter() {
      const text = words.value.toLowerCase();
      const total = (i) => rows.total[i] ?? -Infinity;
      found = rows.text.map((_, i) => i).filter((i) =>
        (run.value === "" || rows.run[i] === Number(run.value)) && (mode.value === "" || rows.mode[i] === mode.value) &&
        (step.value === "" || rows.step[i] === Number(step.value)) && (chosen === null || rows.prompt[i] === chosen) &&
        (!text || rows.text[i].toLowerCase().includes(text) || data.prompts[rows.prompt[i]].toLowerCase().includes(text)));
      if (order.value === "high") found.sort((a, b) => total(b) - total(a));
      if (order.value === "low") found.sort((a, b) => total(a) - total(b));
      if (order.value === "long") found.sort((a, b) => rows.text[b].length - rows.text[a].length);
      list.replaceChildren();
      every.hidden = chosen === null;
      shown = 0;
      grow();
    }
    for (const control of [run, mode, step, order, words]) control.onchange = filter;
    showPrompt = (index) => { chosen = index; filter(); body.scrollIntoView(); };
    body.append(el("div", { className: "row" }, several ? run : null, mode, step, order, words, every), status, list, more);
    filter();
  }

  function settings() {
    const entry = ([name, values]) => [el("dt", {}, name), ...values.map((value, i) =>
      el("dd", {}, several ? swatch(colour(i)) : null, value ?? "–"))];
    if (several) {
      const body = section("Settings that differ", data.differing.length ? "" : "None.");
      body.append(el("dl", {}, ...data.differing.flatMap(entry)));
    }
    if (data.common.length) section("Settings").append(el("details", {}, el("summary", {}, `${data.common.length} settings${several ? " that all runs share" : ""}`),
      el("dl", {}, ...data.common.flatMap(entry))));
  }

  function others() {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.logs)))].filter((name) => !charted.has(name)).sort();
    const own = names.filter((name) => !data.metrics[name] && !name.startsWith("eval_"));
    const fill = (parent, shown) => shown.forEach((name) => metric(parent, name));
    if (own.length) {
      const grid = section("Metrics of the run's own");
      grid.className = "grid";
      fill(grid, own);
    }
    const rest = names.filter((name) => !own.includes(name));
    if (!rest.length) return;
    const grid = el("div", { className: "grid" });
    const details = el("details", { ontoggle: () => { if (details.open && !grid.firstChild) fill(grid, rest); } },
      el("summary", {}, `${rest.length} further metrics`), grid);
    section("All other metrics").append(details);
  }

  page.replaceChildren();
  overview();
  health();
  curves();
  phases("time/", "Time by phase", "s", true);
  phases("memory/", "Memory by phase", "GB", false);
  changed();
  withoutGradient();
  settings();
  others();
  browser();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((draw) => draw()));
})();
