"use strict";
// The rounds of a federated run: a row each, with a line for every client and its phases.
(() => {
  const { byId, make, draw, number, duration } = offbeat;
  const LINE = 6; // Pixels for a client.
  const FATES = ["late", "dropped", "refused"];
  let shown = "";

  /** The clients of a round over its time, on the scale of the longest round. */
  function drawing(round, longest) {
    const share = (seconds) => `${Math.max(0, (100 * seconds) / longest).toFixed(3)}%`;
    const height = Math.max(1, round.clients.length) * LINE;
    const lines = round.clients.flatMap((client, i) => [
      ...client.pieces.map(([phase, from, to]) => draw("rect", { class: `phase-${phase.replace(" ", "-")} ${client.fate}`,
        x: share(from - round.from), y: i * LINE, width: share(Math.max(to - from, longest / 400)), height: LINE - 1 },
      draw("title", { text: `client ${client.client}: ${phase} ${duration(to - from)}, ${client.fate}` }))),
      ...(client.fate === "came" ? [] : [draw("circle", { class: `fate ${client.fate}`, cx: share(client.until - round.from),
        cy: i * LINE + (LINE - 1) / 2, r: LINE / 2 - 0.5 })]),
    ]);
    return draw("svg", { width: "100%", height, role: "img",
      "aria-label": `Round ${round.number}: ${round.clients.length} clients over ${duration(round.seconds)}` }, ...lines);
  }
  function row(round, longest) {
    const more = round.selected > round.clients.length ? ` (${round.clients.length} drawn)` : "";
    return make("tr", { class: round.failed ? "failed" : "" },
      make("th", { scope: "row", class: "number", text: String(round.number) }),
      make("td", { class: "drawing" }, drawing(round, longest)),
      ...[duration(round.seconds), `${number(round.selected)}${more}`, number(round.updates), ...FATES.map((fate) => round[fate] ? number(round[fate]) : "")]
        .map((text) => make("td", { class: "number", text })),
      make("td", { text: round.failed ? `no update: ${round.failed}` : round.waited }));
  }
  /** Show the rounds of a run, the newest first. */
  offbeat.showRounds = (rounds) => {
    byId("rounds-section").hidden = !rounds.length;
    const text = JSON.stringify(rounds);
    if (text === shown) return;
    shown = text;
    const longest = Math.max(1e-9, ...rounds.map((round) => round.seconds - round.from));
    byId("rounds-sum").textContent = rounds.length ? `the last ${rounds.length} of ${rounds.at(-1).number}` : "";
    byId("rounds").tBodies[0].replaceChildren(...rounds.toReversed().map((round) => row(round, longest)));
  };
})();
