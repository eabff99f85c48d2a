"use strict";
// Shared by all parts of the page: elements, number formats, and the source of data.
window.offbeat = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }
  const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const byId = (id) => document.getElementById(id);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function number(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  }
  function duration(seconds) {
    const size = Math.abs(seconds);
    if (size >= 100) return `${Math.round(seconds).toLocaleString("en")} s`;
    if (size >= 1) return `${Number(seconds.toPrecision(3))} s`;
    if (size >= 1e-3) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
    return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  }
  /** About `count` round values for a scale between two values. */
  function ticks(low, high, count) {
    const span = high - low;
    if (!(span > 0)) return [low];
    const rough = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || power;
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
    return found;
  }

  const COLUMNS = [["start", Float64Array], ["length", Float64Array], ["call", Uint32Array],
    ["sequence", Uint32Array], ["times", Uint32Array], ["share", Float32Array], ["label", Uint16Array],
    ["lane", Uint16Array], ["kind", Uint8Array]];
  /** Pieces of lanes as the server packs them. */
  function unpacked(buffer) {
    const size = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    let at = 4 + size;
    for (const [name, Kind] of COLUMNS) {
      head[name] = new Kind(buffer, at, head.count);
      at += head.count * Kind.BYTES_PER_ELEMENT;
    }
    return head;
  }
  /** The pieces in a window, merged as the server does it. */
  function windowed(all, start, stop, pixels) {
    const width = (stop - start) / pixels;
    const long = [];
    const short = [];
    for (let i = 0; i < all.count; i += 1) {
      if (all.start[i] >= stop || all.start[i] + all.length[i] <= start) continue;
      (all.length[i] < width ? short : long).push(i);
    }
    const merged = short.length > pixels;
    const cells = new Map();
    for (const i of merged ? short : []) {
      const pixel = Math.min(pixels - 1, Math.max(0, Math.floor((all.start[i] - start) / width)));
      const cell = (all.lane[i] * all.kinds.length + all.kind[i]) * pixels + pixel;
      const known = cells.get(cell) || [0, 0];
      cells.set(cell, [known[0] + all.length[i], known[1] + all.times[i]]);
    }
    const kept = merged ? long : long.concat(short);
    const found = { ...all, start: null, windowStart: start, windowStop: stop, count: kept.length + cells.size };
    for (const [name, Kind] of COLUMNS) {
      found[name] = new Kind(found.count);
      kept.forEach((i, at) => { found[name][at] = all[name][i]; });
    }
    let at = kept.length;
    for (const [cell, [spent, times]] of cells) {
      const row = Math.floor(cell / pixels);
      found.start[at] = start + (cell % pixels) * width;
      found.length[at] = width;
      found.lane[at] = Math.floor(row / all.kinds.length);
      found.kind[at] = row % all.kinds.length;
      found.call[at] = 0xffffffff;
      found.share[at] = spent / width;
      found.times[at] = times;
      at += 1;
    }
    const inside = all.steps.map((some) => some.filter((time) => time >= start && time <= stop));
    found.steps = inside;
    return found;
  }

  async function answered(path, parameters) {
    const query = new URLSearchParams(parameters);
    const answer = await fetch(`${path}?${query}`, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
    return answer;
  }
  /** Data from the server that serves this page. */
  const server = {
    held: false,
    runs: async () => (await answered("api/runs", {})).json(),
    run: async (run) => (await answered("api/run", { run })).json(),
    lanes: async (run, start, stop, pixels) =>
      unpacked(await (await answered("api/lanes", { run, start, stop, pixels })).arrayBuffer()),
    log: async (run, of) => (await answered("api/log", { run, of })).text(),
    follow: (run, lines, epoch) => new EventSource(`api/follow?${new URLSearchParams({ run, lines, epoch })}`),
  };
  /** Data inside this file. */
  function holding(text) {
    const held = JSON.parse(text);
    const bytes = Uint8Array.from(atob(held.lanes), (letter) => letter.charCodeAt(0));
    const all = unpacked(bytes.buffer);
    return {
      held: true,
      runs: async () => ({ chosen: held.run.name, runs: [], folder: "" }),
      run: async () => held.run,
      lanes: async (run, start, stop, pixels) => windowed(all, start, stop, pixels),
      log: async () => "Logs are not part of a saved page.",
      follow: () => null,
    };
  }
  const inside = byId("held");
  const source = inside ? holding(inside.textContent) : server;

  return { make, draw, byId, color, number, duration, ticks, source };
})();
