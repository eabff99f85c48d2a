"use strict";
// The lanes of all processes on a canvas: what each was in, who waited, and what belongs together.
offbeat.Lanes = class {
  constructor(canvas, detail) {
    this.canvas = canvas;
    this.detail = detail;
    this.run = null;
    this.data = null;
    this.first = this.last = 0;
    this.view = [0, 1];
    this.mode = "all"; // all, follow, free
    this.chosen = 0;
    this.asked = 0;
    this.busy = false;
    this.wanted = false;
    this.queued = false;
    this.onmode = () => {};
    new ResizeObserver(() => this.ask()).observe(canvas.parentElement);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => { this.held = null; });
    canvas.addEventListener("pointerleave", () => { this.held = null; });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // -- what is seen

  show(run, first, last, live) {
    const other = run !== this.run;
    this.run = run;
    this.live = live;
    this.first = first;
    this.last = last;
    if (other) {
      this.data = null;
      this.mode = live ? "follow" : "all";
      this.width = 10;
      this.onmode(this.mode);
    }
    if (this.mode === "all") this.view = [first, Math.max(last, first + 1e-3)];
    else if (this.mode === "follow") this.view = [last - this.width, last];
    if (other || this.mode !== "free") this.ask();
  }
  set(start, stop, mode = "free") {
    const whole = Math.max(this.last - this.first, 1e-3);
    const width = Math.min(Math.max(stop - start, 1e-6), whole * 1.2);
    const middle = Math.min(Math.max((start + stop) / 2, this.first), this.last);
    this.view = [middle - width / 2, middle + width / 2];
    this.mode = mode;
    this.width = width;
    this.onmode(mode);
    this.ask();
  }
  all() { this.set(this.first, this.last, "all"); this.view = [this.first, Math.max(this.last, this.first + 1e-3)]; }
  follow(on) {
    if (on) this.set(this.last - Math.min(10, this.width || 10), this.last, "follow");
    else this.set(...this.view);
  }
  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    const [start, stop] = this.view;
    this.set(at - (at - start) * factor, at + (stop - at) * factor, this.mode === "follow" ? "follow" : "free");
  }
  pan(share) {
    const width = this.view[1] - this.view[0];
    this.set(this.view[0] + share * width, this.view[1] + share * width);
  }

  // -- asking for data: one question at a time, the latest window last; meanwhile the old pieces are drawn moved

  ask() {
    this.asked += 1;
    this.paint();
    this.wanted = true;
    if (!this.busy && this.run !== null && this.canvas.parentElement.clientWidth > 0) this.fetch();
  }
  async fetch() {
    this.busy = true;
    while (this.wanted) {
      this.wanted = false;
      const asked = this.asked;
      const run = this.run;
      const [start, stop] = this.view;
      // What is put together is two pixels wide: half the pieces, and the eye sees no less.
      const pixels = Math.max(100, Math.min(8000, Math.round(this.inner() / 2)));
      try {
        const data = await offbeat.source.lanes(run, start, stop, pixels);
        if (run === this.run) {
          this.data = data;
          this.answered = asked;
          this.paint();
        }
      } catch (error) {
        this.detail.textContent = `The lanes could not be read. ${error.message}`;
      }
    }
    this.busy = false;
  }
  paint() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => {
      this.queued = false;
      this.draw();
      const answered = this.answered;
      // After the frame: a message is handled once the browser has painted.
      requestAnimationFrame(() => this.canvas.dispatchEvent(new CustomEvent("painted", { detail: { answered } })));
    });
  }

  // -- drawing

  inner() { return Math.max(100, this.canvas.parentElement.clientWidth - 34 - this.gutter()); }
  gutter() { return this.canvas.clientWidth < 500 ? 62 : 86; }
  x(time) { return this.gutter() + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.plot; }
  time(x) { return this.view[0] + ((x - this.gutter()) / this.plot) * (this.view[1] - this.view[0]); }

  draw() {
    const lanes = this.data ? this.data.lanes : [];
    const count = Math.max(1, lanes.length);
    this.row = Math.max(10, Math.min(36, Math.floor(520 / count)));
    const ratio = window.devicePixelRatio || 1;
    const height = count * this.row + 24;
    this.canvas.style.height = `${height}px`;
    const width = this.canvas.clientWidth;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    this.plot = Math.max(50, width - this.gutter() - 4);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    if (!this.data) return;
    this.colors = Object.fromEntries(["wait", "communicate", "under-way", "failed", "stuck", "microbatch-forward", "microbatch-backward",
      "microbatch-weights", "base", "ink", "quiet", "grid",
      "card", "accent", "line"].map((name) => [name, offbeat.color(name)]));
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter(), 0, this.plot, height);
    pen.clip();
    this.bases(pen);
    this.pieces(pen);
    this.together(pen);
    this.steps(pen);
    pen.restore();
    this.names(pen, lanes);
    this.axis(pen, height);
  }
  bases(pen) {
    pen.fillStyle = this.colors.base;
    this.data.extents.forEach(([from, to], lane) => {
      const [left, right] = [this.x(from), this.x(to)];
      pen.fillRect(left, lane * this.row + 2, right - left, this.row - 4);
    });
  }
  pieces(pen) {
    const { count, start, length, lane, kind, share, kinds } = this.data;
    const scale = this.plot / (this.view[1] - this.view[0]);
    const from = this.gutter() - this.view[0] * scale;
    const edge = this.gutter() + this.plot;
    const colors = kinds.map((name) => this.colors[name.replace(" ", "-")]);
    const thin = kinds.indexOf("under way");
    // What is under way lies below, in a thin line; then by kind, so that the colour changes seldom.
    for (const wanted of [thin, ...kinds.keys()].filter((one, i) => i === 0 || one !== thin)) {
      pen.fillStyle = colors[wanted];
      const [down, high] = wanted === thin ? [this.row - 5, 3] : [2, this.row - 4];
      let alpha = 1;
      for (let i = 0; i < count; i += 1) {
        if (kind[i] !== wanted) continue;
        const left = from + start[i] * scale;
        const wide = Math.max(length[i] * scale, 0.6);
        if (left > edge || left + wide < 0) continue;
        const level = Math.min(1, Math.ceil(share[i] * 8) / 8);
        if (level !== alpha) {
          alpha = level;
          pen.globalAlpha = alpha;
        }
        pen.fillRect(left, lane[i] * this.row + down, wide, high);
      }
      pen.globalAlpha = 1;
    }
  }
  /** Calls of several lanes as bands, messages as arrows; only where they can be told apart. */
  together(pen) {
    const calls = this.calls();
    if (!calls) return;
    pen.lineWidth = 1;
    for (const members of calls.values()) {
      if (members.length < 2) continue;
      const label = this.data.labels[members[0].label];
      const sender = members.find((one) => this.data.labels[one.label]?.[0].startsWith("send to"));
      if (sender) {
        this.arrow(pen, sender, members.find((one) => one !== sender));
        continue;
      }
      members.sort((one, other) => one.lane - other.lane);
      members.slice(1).forEach((lower, i) => this.band(pen, members[i], lower));
      const upper = members[0];
      const wide = this.x(upper.to) - this.x(upper.from);
      if (label && wide > 90 && this.row > 18) {
        pen.fillStyle = this.colors.ink;
        pen.font = "11px system-ui, sans-serif";
        const left = Math.max(this.x(upper.from), this.gutter()) + 4;
        pen.fillText(`${label[0]} #${upper.sequence}`, left, upper.lane * this.row + this.row / 2 + 4, wide - 8);
      }
    }
  }
  /** Joins two lanes of a call, faintly across lanes that have no part in it. */
  band(pen, upper, lower) {
    const [top, bottom] = [(upper.lane + 1) * this.row - 2, lower.lane * this.row + 2];
    pen.beginPath();
    pen.moveTo(this.x(upper.from), top);
    pen.lineTo(this.x(lower.from), bottom);
    pen.lineTo(this.x(lower.to), bottom);
    pen.lineTo(this.x(upper.to), top);
    pen.closePath();
    const beside = lower.lane === upper.lane + 1;
    pen.globalAlpha = beside ? 0.45 : 0.06;
    pen.fillStyle = this.colors.communicate;
    pen.fill();
    pen.globalAlpha = beside ? 0.5 : 0.2;
    pen.strokeStyle = this.colors.quiet;
    pen.stroke();
    pen.globalAlpha = 1;
  }
  calls() {
    const { count, start, length, lane, call, label, sequence } = this.data;
    if (count > 6000) return null;
    const found = new Map();
    for (let i = 0; i < count; i += 1) {
      if (call[i] === 0xffffffff) continue;
      if (!found.has(call[i])) found.set(call[i], []);
      const members = found.get(call[i]);
      let one = members.find((known) => known.lane === lane[i]);
      if (!one) {
        one = { lane: lane[i], from: start[i], to: start[i] + length[i], label: label[i], sequence: sequence[i] };
        members.push(one);
      }
      one.from = Math.min(one.from, start[i]);
      one.to = Math.max(one.to, start[i] + length[i]);
    }
    return found.size <= this.plot / 16 ? found : null;
  }
  arrow(pen, sender, receiver) {
    const from = [this.x(sender.from), (sender.lane + 0.5) * this.row];
    const to = [this.x(receiver.to), (receiver.lane + 0.5) * this.row];
    const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
    pen.strokeStyle = pen.fillStyle = this.colors.accent;
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(...to);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(...to);
    for (const turn of [-0.4, 0.4]) pen.lineTo(to[0] - 8 * Math.cos(angle + turn), to[1] - 8 * Math.sin(angle + turn));
    pen.fill();
  }
  steps(pen) {
    pen.fillStyle = this.colors.ink;
    pen.globalAlpha = 0.55;
    this.data.steps.forEach((times, lane) => {
      if (times.length > this.plot / 5) return;
      for (const time of times) pen.fillRect(this.x(time), lane * this.row + 2, 1, Math.max(4, this.row / 4));
    });
    pen.globalAlpha = 1;
  }
  names(pen, lanes) {
    pen.font = `${this.row < 14 ? 9 : 12}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    lanes.forEach((name, lane) => {
      if (lane === this.chosen && document.activeElement === this.canvas) {
        pen.fillStyle = this.colors.accent;
        pen.fillRect(0, lane * this.row + 2, 3, this.row - 4);
      }
      const home = this.data.machines?.[lane];
      const begins = home && home !== this.data.machines[lane - 1];
      if (begins && lane) {
        pen.fillStyle = this.colors.quiet;
        pen.fillRect(0, lane * this.row - 0.5, this.gutter() + this.plot, 1);
      }
      const both = begins && this.row >= 28;
      if (both) {
        pen.save();
        pen.font = "bold 10px system-ui, sans-serif";
        pen.fillStyle = this.colors.ink;
        pen.fillText(home, 6, lane * this.row + 9, this.gutter() - 10);
        pen.restore();
      }
      pen.fillStyle = this.colors.quiet;
      pen.fillText(name, 6, (lane + 0.5) * this.row + (both ? 6 : 0), this.gutter() - 10);
    });
    pen.textBaseline = "alphabetic";
  }
  axis(pen, height) {
    pen.font = "11px system-ui, sans-serif";
    const [start, stop] = this.view;
    const marks = offbeat.ticks(start - this.first, stop - this.first, this.plot / 110);
    const step = marks.length > 1 ? marks[1] - marks[0] : stop - start;
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
    for (const at of marks) {
      const x = this.x(at + this.first);
      if (x < this.gutter() || x > this.gutter() + this.plot - 10) continue;
      pen.fillStyle = this.colors.line;
      pen.fillRect(x, height - 22, 1, 5);
      pen.fillStyle = this.colors.quiet;
      const words = `${at.toFixed(digits)} s`;
      pen.fillText(words, Math.min(x + 3, this.gutter() + this.plot - pen.measureText(words).width), height - 8);
    }
  }

  // -- hands

  wheel(event) {
    if (document.activeElement !== this.canvas && !event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((event.deltaX || event.deltaY) / 800);
      return;
    }
    this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), this.time(this.at(event)[0]));
  }
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  grab(event) {
    this.canvas.focus({ preventScroll: true });
    this.held = { x: this.at(event)[0], view: this.view };
    this.canvas.setPointerCapture(event.pointerId);
    this.chosen = Math.min(Math.floor(this.at(event)[1] / this.row), (this.data?.lanes.length || 1) - 1);
  }
  move(event) {
    const [x, y] = this.at(event);
    if (!this.held) {
      this.tell(this.time(x), Math.floor(y / this.row));
      return;
    }
    const [start, stop] = this.held.view;
    const moved = ((x - this.held.x) / this.plot) * (stop - start);
    if (Math.abs(x - this.held.x) > 3 || this.mode === "free") this.set(start - moved, stop - moved);
  }
  key(event) {
    const acts = {
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), "0": () => this.all(),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
      ArrowUp: () => this.choose(-1), ArrowDown: () => this.choose(1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }
  choose(by) {
    this.chosen = Math.max(0, Math.min((this.data?.lanes.length || 1) - 1, this.chosen + by));
    this.paint();
    this.tell((this.view[0] + this.view[1]) / 2, this.chosen);
  }
  /** Describes what a lane is doing at a time. */
  tell(time, lane) {
    const data = this.data;
    if (!data || !data.lanes[lane]) return;
    const room = (this.view[1] - this.view[0]) / this.plot;
    let found = -1;
    for (let i = 0; i < data.count; i += 1) {
      if (data.lane[i] !== lane || data.start[i] - room > time || data.start[i] + data.length[i] + room < time) continue;
      if (found < 0 || data.kind[i] < data.kind[found]) found = i;
    }
    const home = data.machines?.[lane] ? ` on ${data.machines[lane]}` : "";
    const when = `${data.lanes[lane]}${home} at ${(time - this.first).toFixed(3)} s`;
    if (found < 0) {
      const [from, to] = data.extents[lane];
      this.detail.textContent = time >= from && time <= to ? `${when}: computes.` : when;
      return;
    }
    const kind = data.kinds[data.kind[found]];
    const what = data.labels[data.label[found]];
    if (data.label[found] && what && kind.startsWith("microbatch")) {
      const took = offbeat.duration(data.length[found]);
      this.detail.textContent = `${when}: computes ${what[0]} of microbatch ${data.sequence[found]} for ${took}, ${what[1]}`;
      return;
    }
    if (data.call[found] === 0xffffffff) {
      const share = Math.round(Math.min(1, data.share[found]) * 100);
      const times = data.times[found].toLocaleString("en");
      this.detail.textContent = `${when}: ${kind} for ${share} % of this pixel, ${times} times; zoom in to see each.`;
      return;
    }
    const label = data.labels[data.label[found]] || ["something", ""];
    const length = offbeat.duration(data.length[found]);
    const verb = { wait: "waits", communicate: "communicates", "under way": "has in flight", failed: "fails",
      stuck: "waits and never returns" }[kind];
    const how = kind === "stuck" ? "" : ` for ${length}`;
    this.detail.textContent = `${when}: ${verb}${how} in ${label[0]} #${data.sequence[found]} ${label[1]}`;
  }
};
