"use strict";
// The page: selects a run, shows it, and follows it.
(() => {
  const { byId, make, number, duration, source, charts } = offbeat;
  const KINDS = ["compute", "input", "communicate", "wait", "bubble", "evaluate", "other"];
  const NOT_SCORES = new Set(["step", "epoch", "samples", "seconds", "bytes_sent", "loss"]);
  const MANY = 12;
  let run = null; // what is shown
  let lines = [];
  let stream = null;
  let against = "seconds";

  /** The name of the metric that is shown as the score. */
  offbeat.scored = (some) => {
    const last = some.at(-1) || {};
    const names = Object.keys(last).filter((name) => typeof last[name] === "number" && !NOT_SCORES.has(name));
    return ["score", "accuracy"].find((name) => names.includes(name)) || names[0] || "score";
  };

  const lanes = new offbeat.Lanes(byId("lanes"), byId("lanes-detail"));
  const runs = new offbeat.Runs((name) => choose(name));
  offbeat.lanes = lanes;

  function header() {
    const workers = run.config.workers;
    byId("title").textContent = `${run.strategy} on ${workers || "?"} worker${workers === 1 ? "" : "s"}`;
    const script = run.config.what?.script;
    const what = script ? script.split("/").at(-1) : run.config.what?.task?.source || "";
    byId("about").textContent = [what, run.state, run.started.replace("T", " ").slice(0, 19), run.name]
      .filter(Boolean).join(" · ");
    document.title = `${run.verdicts[0]?.kind || run.state} · ${run.strategy} · offbeat`;
    byId("export").href = `api/export?${new URLSearchParams({ run: run.name })}`;
  }
  function verdicts() {
    const box = byId("verdicts");
    const text = JSON.stringify(run.verdicts);
    if (box.dataset.shown === text) return; // Otherwise a screen reader would repeat it.
    box.dataset.shown = text;
    box.replaceChildren(...run.verdicts.map((one) => {
      const stacks = Object.entries(one.stacks || {});
      const more = stacks.length ? [make("details", {}, make("summary", { text: "Stacks" }),
        ...stacks.flatMap(([who, stack]) => [make("h3", { text: who }), make("pre", { text: stack })]))] : [];
      return make("div", { class: `verdict ${one.level}` }, make("strong", { text: `${one.kind}:` }), ` ${one.message}`, ...more);
    }));
  }
  function doing(one) {
    const step = !one.step ? "" : `step ${one.at_least ? "≥ " : ""}${number(one.step)}`;
    const pace = one.steps_per_second ? `${number(one.steps_per_second)} steps/s` : "";
    const whom = one.waits_for?.length ? ` for ${one.waits_for.slice(0, 3).join(", ")}${one.waits_for.length > 3 ? " …" : ""}` : "";
    const since = one.seconds > 1 ? `, ${duration(one.seconds)} so far` : "";
    const state = { waiting: `waits${since}`, gone: "gone", over: "over", ended: "ended", unwatched: "not watched" };
    const wait = one.waits_in ? `${one.state === "gone" ? "was waiting" : ""}${whom} in ${one.waits_in}` : "";
    const said = [state[one.state] || one.state, step, pace];
    if (run.processes.length > MANY) said.unshift(...said.splice(1, 1)); // Only the first words have room.
    return [said.filter(Boolean).join(" · "), wait.trim()];
  }
  function strip() {
    const box = byId("strip");
    box.classList.toggle("many", run.processes.length > MANY);
    while (box.children.length > run.processes.length) box.lastChild.remove();
    run.processes.forEach((one, i) => {
      const card = box.children[i] || box.appendChild(make("button", { type: "button" },
        make("span", { class: "name" }), make("span", { class: "doing" }), make("span", { class: "doing" })));
      const [first, second] = doing(one);
      card.className = `process ${one.state}`;
      card.title = `${one.name}: ${first} ${second}`;
      card.children[0].textContent = one.name;
      card.children[1].textContent = first;
      card.children[2].textContent = second;
      card.onclick = () => showLog(one.name);
    });
    const counts = new Map();
    for (const one of run.processes) counts.set(one.state, (counts.get(one.state) || 0) + 1);
    byId("strip-sum").textContent = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  }
  /** The link of each machine: how late, how much behind, what was lost. */
  function machines() {
    const known = run.machines || [];
    byId("machines-section").hidden = !known.length;
    byId("machines-sum").textContent = `${known.length} machines`;
    byId("machines").tBodies[0].replaceChildren(...known.map((one) => make("tr", { class: one.lost ? "lossy" : "" },
      make("th", { scope: "row", text: one.name }), make("td", { text: one.processes.join(", ") }), make("td", { text: one.clock }),
      ...[one.delay === null ? "–" : `${(1000 * one.delay).toPrecision(2)} ms`, number(one.waiting), number(one.received),
        number(one.lost), number(one.restarts), run.live ? `${one.silent.toFixed(1)} s ago` : "–"]
        .map((text) => make("td", { class: "number", text })))));
  }
  async function showLog(name) {
    byId("log").hidden = false;
    byId("log-title").textContent = `Log of ${name}`;
    const text = await source.log(run.name, name.replaceAll(" ", "-")).catch((error) => error.message);
    byId("log-text").textContent = text || "No output.";
    byId("log-text").scrollTop = byId("log-text").scrollHeight;
    byId("log-close").focus();
  }

  function points(key) {
    return lines.filter((line) => Number.isFinite(line[key])).map((line) => [line[against], line[key]]);
  }
  function curves() {
    byId("nothing").hidden = lines.length > 0;
    byId("charts").hidden = lines.length === 0;
    byId("nothing").textContent = run.live ? "Nothing reported yet." : "Nothing was reported: the script made no report, or never called offbeat.init().";
    if (!lines.length) return;
    const xName = against === "seconds" ? "s" : "steps";
    const key = offbeat.scored(lines);
    const wanted = /^(?:(\w+)(?:>=|<=|=))?(-?[\d.e-]+)$/.exec(run.config.goal?.target || "");
    const last = lines.at(-1) || {};
    const others = Object.keys(last)
      .filter((name) => name !== key && !NOT_SCORES.has(name) && typeof last[name] === "number").slice(0, 3);
    charts.lines(byId("score"), {
      series: [key, ...others].map((name, i) => ({ name, color: `line-${i}`, points: points(name) })),
      xName, target: wanted && [key, "score", undefined].includes(wanted[1]) ? Number(wanted[2]) : null,
      empty: "No score reported yet.",
    });
    charts.lines(byId("loss"), {
      series: [{ name: "loss", color: "line-1", points: points("loss") }], xName, empty: "No loss reported.",
    });
    const speeds = lines.map((line, i) => {
      const before = lines[i - 1] || { samples: 0, seconds: 0 };
      return [line[against], (line.samples - before.samples) / (line.seconds - before.seconds)];
    }).filter((point) => Number.isFinite(point[1]) && point[1] >= 0);
    charts.lines(byId("speed"), {
      series: [{ name: "examples/s", color: "line-2", points: speeds }], xName, zero: true, empty: "Nothing reported yet.",
    });
    split(xName);
    const counts = Object.entries(Object.keys(run.result.staleness || {}).length ? run.result.staleness : last.staleness || {})
      .sort((one, other) => one[0] - other[0]);
    charts.bars(byId("staleness"), { counts, xName: "steps old", empty: "No staleness reported." });
  }
  function split(xName) {
    const rows = lines.map((line, i) => {
      const before = lines[i - 1]?.seconds_by_kind || {};
      const spent = Object.fromEntries(KINDS.map((kind) =>
        [kind, Math.max(0, (line.seconds_by_kind?.[kind] || 0) - (before[kind] || 0))]));
      const total = Object.values(spent).reduce((sum, one) => sum + one, 0);
      const shares = Object.fromEntries(KINDS.map((kind) => [kind, spent[kind] / (total || 1)]));
      return { from: lines[i - 1]?.[against] || 0, x: line[against], shares, total };
    }).filter((row) => row.total > 0 && row.x > row.from);
    charts.stacked(byId("split"), { rows, names: KINDS, xName, empty: "Nothing reported yet." });
    const sums = run.result.seconds_by_kind || lines.at(-1)?.seconds_by_kind || {};
    const total = Object.values(sums).reduce((sum, one) => sum + one, 0);
    charts.legend(byId("split-legend"), KINDS.map((kind) =>
      [total ? `${kind} ${Math.round((100 * (sums[kind] || 0)) / total)} %` : kind, kind]));
  }
  function showLanes() {
    byId("lanes-section").hidden = !run.events;
    byId("follow-label").hidden = !run.live;
    const dropped = run.dropped ? `, ${number(run.dropped)} older ones overwritten` : "";
    byId("lanes-sum").textContent = `${number(run.events)} events${dropped}`;
    if (run.events) lanes.show(run.name, run.first, run.last, run.live);
  }

  function show(told) {
    const anew = !run || run.name !== told.name || run.epoch !== told.epoch;
    const more = told.metrics.length > 0 || anew || run.state !== told.state;
    lines = anew ? told.metrics : lines.concat(told.metrics);
    run = told;
    header();
    verdicts();
    strip();
    machines();
    offbeat.showRounds(run.rounds || []);
    if (more) curves();
    showLanes();
    byId("foot").textContent = source.held
      ? "A saved page; all data is in this file."
      : "As text or JSON: offbeat explain RUN. Prometheus metrics: /metrics.";
  }
  async function choose(name) {
    stream?.close();
    run = null;
    byId("log").hidden = true;
    const told = await source.run(name);
    show(told);
    if (!source.held) follow(told);
    await runs.show(await source.runs(), name);
  }
  function follow(told) {
    stream = source.follow(told.name, told.lines, told.epoch);
    stream.addEventListener("run", (event) => {
      byId("lost").hidden = true;
      const news = JSON.parse(event.data);
      if (run && news.name === run.name) show(news);
    });
    stream.addEventListener("runs", (event) => runs.show(JSON.parse(event.data), run?.name));
    stream.onerror = () => {
      byId("lost").hidden = false;
      byId("lost").textContent = "The page's server is gone, perhaps because the run is over. What you see stays. "
        + `Reopen it with: offbeat watch ${run?.folder || ""}`;
      // Reconnecting would begin where this stream began; a new one begins where the page is.
      stream.close();
      setTimeout(() => { if (run) source.run(run.name).then((again) => { run = null; show(again); follow(again); }, () => {}); }, 3000);
    };
  }

  function theme() {
    const root = document.documentElement;
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
    const say = () => { byId("theme").textContent = dark() ? "Light" : "Dark"; lanes.paint(); };
    byId("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
    say();
  }
  function hands() {
    byId("choose").addEventListener("change", (event) => choose(event.target.value));
    byId("log-close").addEventListener("click", () => { byId("log").hidden = true; });
    byId("zoom-in").addEventListener("click", () => lanes.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => lanes.zoom(2));
    byId("zoom-all").addEventListener("click", () => lanes.all());
    byId("follow").addEventListener("change", (event) => lanes.follow(event.target.checked));
    lanes.onmode = (mode) => { byId("follow").checked = mode === "follow"; };
    for (const radio of document.querySelectorAll("input[name=against]")) {
      radio.addEventListener("change", () => { against = radio.value; curves(); });
    }
    charts.legend(byId("rounds-legend"), [["download", "input"], ["training", "compute"], ["upload", "communicate"],
      ["at work (phase not known)", "evaluate"], ["late, dropped or refused", "wait"]]);
    charts.legend(byId("lanes-legend"), [["computes", "base"], ["waits for others", "wait"],
      ["communicates", "communicate"], ["in flight", "under-way"], ["stuck until the end", "stuck"], ["failed", "failed"],
      ["microbatch forward", "microbatch-forward"], ["backward", "microbatch-backward"], ["gradients of weights", "microbatch-weights"]]);
  }
  async function begin() {
    if (location.search.includes("token=")) history.replaceState(null, "", location.pathname);
    document.body.classList.toggle("held", source.held);
    theme();
    hands();
    const listed = await source.runs();
    if (listed.chosen) await choose(listed.chosen);
    else {
      byId("title").textContent = "No runs yet";
      byId("about").textContent = `Start one: offbeat run offbeat.tasks.digits --workers 2 --monitor (in ${listed.folder})`;
      setTimeout(() => location.reload(), 3000);
    }
  }
  begin().catch((error) => {
    byId("lost").hidden = false;
    byId("lost").textContent = `The page could not be shown. ${error.message}`;
  });
})();
