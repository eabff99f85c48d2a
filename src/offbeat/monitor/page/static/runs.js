"use strict";
// The list of runs, and their scores against time.
offbeat.Runs = class {
  constructor(choose) {
    this.choose = choose;
    this.ticked = new Set();
    this.known = new Map();
    this.listed = [];
  }

  async show(listed, current) {
    const { byId, make, number } = offbeat;
    this.listed = listed.runs;
    if (!this.ticked.size && listed.runs.length) this.first(current);
    const select = byId("choose");
    select.replaceChildren(...listed.runs.map((run) => {
      const option = make("option", { value: run.name, text: run.name });
      option.selected = run.name === current;
      return option;
    }));
    byId("runs-sum").textContent = `${listed.runs.length} in ${listed.folder.split("/").at(-1)}`;
    byId("runs-sum").title = listed.folder;
    const focused = document.activeElement?.dataset?.key;
    byId("runs").tBodies[0].replaceChildren(...listed.runs.map((run) => {
      const tick = make("input", {
        type: "checkbox", "aria-label": `compare ${run.name}`, "data-key": `tick ${run.name}`,
        onchange: (event) => this.tick(run.name, event.target.checked),
      });
      tick.checked = this.ticked.has(run.name);
      const go = make("button", {
        type: "button", text: run.name, "data-key": `go ${run.name}`, onclick: () => this.choose(run.name),
      });
      const state = run.verdict ? `${run.state}: ${run.verdict}` : run.state;
      const figures = [run.workers, run.score, run.seconds_to_target, run.seconds, run.samples_per_second];
      return make("tr", run.name === current ? { "aria-current": "true" } : {},
        make("td", {}, tick), make("td", {}, go), make("td", { text: state }), make("td", { text: run.strategy }),
        ...figures.map((value) => make("td", { class: "number", text: number(value) })));
    }));
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    await this.compare();
  }
  /** To begin with: the run that is shown, and the newest others of the same task. */
  first(current) {
    const own = this.listed.find((run) => run.name === current) || this.listed[0];
    const others = this.listed.filter((run) => run !== own && run.task === own.task && run.score !== undefined);
    for (const run of [own, ...others.slice(0, 3)]) this.ticked.add(run.name);
  }
  tick(name, on) {
    if (on) this.ticked.add(name);
    else this.ticked.delete(name);
    this.compare();
  }
  /** A run that has changed since it was read is read again. */
  async lines(run) {
    const mark = run.state === "running" ? performance.now() : run.state;
    const known = this.known.get(run.name);
    if (known?.mark !== mark) {
      const told = await offbeat.source.run(run.name);
      this.known.set(run.name, { mark, lines: told.metrics });
    }
    return this.known.get(run.name).lines;
  }
  async compare() {
    const { byId, charts } = offbeat;
    const chosen = this.listed.filter((run) => this.ticked.has(run.name)).slice(0, 6);
    const all = await Promise.all(chosen.map((run) => this.lines(run)));
    const series = chosen.map((run, i) => {
      const key = offbeat.scored(all[i]);
      const points = all[i].filter((line) => key in line).map((line) => [line.seconds, line[key]]);
      return { name: run.strategy || run.name, color: `line-${i}`, points };
    });
    byId("comparison").classList.toggle("tall", series.some((one) => one.points.length));
    charts.lines(byId("comparison"), { series, xName: "s", begin: 0, empty: "Tick runs that have reported a score." });
    charts.legend(byId("comparison-legend"), chosen.map((run, i) =>
      [`${run.strategy} on ${run.workers} (${run.name.slice(0, 15)})`, `line-${i}`]));
  }
};
