"use strict";
// Small charts as SVG: lines, stacked shares, bars.
offbeat.charts = (() => {
  const { make, draw, number, ticks } = offbeat;
  const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };
  const drawn = new Map();
  const observer = new ResizeObserver((entries) => entries.forEach(({ target }) => drawn.get(target)?.()));

  function none(box, words) {
    box.replaceChildren(make("div", { class: "none", text: words }));
  }
  /** Draw now, and again whenever the box changes its size. */
  function kept(box, paint) {
    if (!drawn.has(box)) observer.observe(box);
    drawn.set(box, paint);
    paint();
  }
  function area(box) {
    const width = Math.max(120, box.clientWidth);
    const height = Math.max(80, box.clientHeight);
    return { width, height, right: width - MARGIN.right, bottom: height - MARGIN.bottom };
  }
  const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

  function axes(svg, place, x, y, xs, ys, xName, yWords = number) {
    for (const at of ys) {
      svg.append(draw("line", { class: "grid", x1: MARGIN.left, x2: place.right, y1: y(at), y2: y(at) }));
      svg.append(draw("text", { x: MARGIN.left - 6, y: y(at) + 4, "text-anchor": "end", text: yWords(at) }));
    }
    const last = xs.length - 1;
    xs.forEach((at, i) => {
      const words = i === last && xName ? `${number(at)} ${xName}` : number(at);
      const anchor = x(at) > place.right - 24 ? "end" : "middle";
      svg.append(draw("text", { x: x(at), y: place.height - 6, "text-anchor": anchor, text: words }));
    });
    svg.append(draw("line", { class: "axis", x1: MARGIN.left, x2: place.right, y1: place.bottom, y2: place.bottom }));
  }
  function range(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return [low, high];
  }
  /** Shows a tip for the point nearest to the pointer. */
  function pointing(box, svg, place, x, points, words) {
    const cursor = draw("line", { class: "cursor", y1: MARGIN.top, y2: place.bottom, visibility: "hidden" });
    svg.append(cursor);
    const tip = make("div", { class: "tip", hidden: "" });
    box.append(tip);
    svg.addEventListener("pointermove", (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      const near = points.reduce((best, value) => (Math.abs(x(value) - at) < Math.abs(x(best) - at) ? value : best));
      cursor.setAttribute("x1", x(near));
      cursor.setAttribute("x2", x(near));
      cursor.setAttribute("visibility", "visible");
      tip.textContent = words(near);
      tip.hidden = false;
      tip.style.top = "4px";
      tip.style.left = `${Math.max(0, Math.min(x(near) + 8, place.width - tip.offsetWidth))}px`;
    });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      cursor.setAttribute("visibility", "hidden");
    });
  }

  /** Lines over a common axis: series are {name, color, points: [[x, y], ...]}. */
  function lines(box, { series, xName, target = null, empty, zero = false, begin = null }) {
    const some = series.filter((one) => one.points.length);
    if (!some.length) return kept(box, () => none(box, empty));
    return kept(box, () => {
      const place = area(box);
      const all = some.flatMap((one) => one.points);
      let [left, right] = range(all.map((point) => point[0]));
      left = begin ?? left;
      let [low, high] = range([...all.map((point) => point[1]), ...(target === null ? [] : [target])]);
      if (zero) low = Math.min(0, low);
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      [low, high] = [zero && low === 0 ? 0 : low - room, high + room];
      const x = scale(left === right ? left - 1 : left, right, MARGIN.left, place.right);
      const y = scale(low, high, place.bottom, MARGIN.top);
      const last = some.map((one) => `${one.name} ${number(one.points.at(-1)[1])}`).join(", ");
      const svg = draw("svg", { role: "img", "aria-label": `${last} at ${number(right)} ${xName}` });
      axes(svg, place, x, y, ticks(left, right, place.width / 64), ticks(low, high, 5), xName);
      if (target !== null) {
        svg.append(draw("line", { class: "target", x1: MARGIN.left, x2: place.right, y1: y(target), y2: y(target) }));
        svg.append(draw("text", { x: MARGIN.left + 6, y: y(target) - 4, text: `target ${number(target)}` }));
      }
      for (const one of some) {
        const stroke = `var(--${one.color})`;
        const path = one.points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
        svg.append(draw("path", { d: path.join(""), fill: "none", stroke, "stroke-width": 2, "stroke-linejoin": "round" }));
        for (const point of one.points.length <= 60 ? one.points : [one.points.at(-1)]) {
          svg.append(draw("circle", { cx: x(point[0]), cy: y(point[1]), r: 2.5, fill: stroke }));
        }
      }
      box.replaceChildren(svg);
      pointing(box, svg, place, x, all.map((point) => point[0]), (at) =>
        [`${number(at)} ${xName}`, ...some.flatMap((one) =>
          one.points.filter((point) => point[0] === at).map((point) => `${one.name} ${number(point[1])}`))].join("\n"));
    });
  }

  /** Shares of a whole over time: rows are {x, from, shares: {name: part}}. */
  function stacked(box, { rows, names, xName, empty }) {
    if (!rows.length) return kept(box, () => none(box, empty));
    return kept(box, () => {
      const place = area(box);
      const x = scale(rows[0].from, rows.at(-1).x, MARGIN.left, place.right);
      const y = scale(0, 1, place.bottom, MARGIN.top);
      const svg = draw("svg", { role: "img", "aria-label": `Shares of the time: ${shares(rows.at(-1), names)}` });
      for (const row of rows) {
        let below = 0;
        for (const name of names) {
          const share = row.shares[name] || 0;
          const [left, right] = [x(row.from), x(row.x)];
          svg.append(draw("rect", {
            x: left, y: y(below + share), width: Math.max(0.5, right - left - (right - left > 6 ? 1 : 0)),
            height: Math.max(0, y(below) - y(below + share)), fill: `var(--${name})`,
          }));
          below += share;
        }
      }
      const xs = ticks(rows[0].from, rows.at(-1).x, place.width / 64);
      axes(svg, place, x, y, xs, [0, 0.5, 1], xName, (at) => `${Math.round(at * 100)} %`);
      box.replaceChildren(svg);
      pointing(box, svg, place, x, rows.map((row) => row.x), (at) =>
        `until ${number(at)} ${xName}\n${shares(rows.find((row) => row.x === at), names, "\n")}`);
    });
  }
  const shares = (row, names, between = ", ") =>
    names.filter((name) => row.shares[name] >= 0.005)
      .map((name) => `${name} ${Math.round(row.shares[name] * 100)} %`).join(between);

  /** A histogram: counts are [[name, count], ...]. */
  function bars(box, { counts, xName, empty }) {
    if (!counts.length) return kept(box, () => none(box, empty));
    return kept(box, () => {
      const place = area(box);
      const total = counts.reduce((sum, one) => sum + one[1], 0);
      const most = Math.max(...counts.map((one) => one[1]));
      const y = scale(0, most, place.bottom, MARGIN.top + 12);
      const step = (place.right - MARGIN.left) / counts.length;
      const words = counts.map((one) => `${one[0]} ${xName}: ${number(one[1])}`).join(", ");
      const svg = draw("svg", { role: "img", "aria-label": words });
      axes(svg, place, () => 0, y, [], ticks(0, most, 4), "");
      counts.forEach(([name, count], i) => {
        const left = MARGIN.left + i * step;
        const width = Math.min(64, step * 0.8);
        const middle = left + step / 2;
        svg.append(draw("rect", {
          x: middle - width / 2, width, y: y(count), height: place.bottom - y(count), fill: "var(--evaluate)", rx: 2,
        }, draw("title", { text: `${name} ${xName}: ${number(count)}` })));
        if (step > 26 || i % Math.ceil(26 / step) === 0) {
          const last = i === counts.length - 1 ? ` ${xName}` : "";
          const anchor = last && counts.length > 1 ? "end" : "middle";
          const at = anchor === "end" ? Math.min(place.right, middle + 24) : middle;
          svg.append(draw("text", { x: at, y: place.height - 6, "text-anchor": anchor, text: name + last }));
        }
        if (step > 40) {
          const share = `${Math.round((100 * count) / total)} %`;
          svg.append(draw("text", { x: middle, y: y(count) - 4, "text-anchor": "middle", text: share }));
        }
      });
      box.replaceChildren(svg);
    });
  }

  function legend(box, entries) {
    box.replaceChildren(...entries.map(([name, color]) => {
      const mark = make("i", {});
      mark.style.background = `var(--${color})`;
      return make("span", {}, mark, name);
    }));
  }
  return { lines, stacked, bars, legend };
})();
