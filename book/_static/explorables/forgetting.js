// One stream of tokens through five rules: what each state keeps, and what a key reads from it.

"use strict";

explorable("fig-token-weights", "Go to any token of the stream: what does a key read, by each rule?", ui => {
  const start = {
    keys: [[1, 0], [0, 1], [0, 1], [1, 0], [0.6, 0.8], [0, 1]],
    values: [[10], [30], [30], [50], [60], [20]],
  };
  const N = start.keys.length;
  const every = Array.from({length: N}, (_, i) => i + 1);  // the tokens, counted from 1

  // --- The rules: the state S, (C, M), after a token, from the state before it ---

  const read = (S, q) => vectorTimesMatrix(q, S);  // Sᵀ q
  const write = (S, k, u) => addMatrices(S, outer(k, u));  // S + k uᵀ
  const scaleRows = (factors, S) => S.map((row, c) => row.map(x => factors[c] * x));  // diag(α) S
  const correction = (S, {k, v, beta}) =>  // β (v − Sᵀ k)
    read(S, k).map((found, m) => beta * (v[m] - found));

  const rules = {
    plain: (S, {k, v}) => write(S, k, v),
    decay: (S, {k, v, gamma}) => write(scaleMatrix(gamma, S), k, v),
    gate: (S, {k, v, gates}) => write(scaleRows(gates, S), k, v),
    delta: (S, token) => write(S, token.k, correction(S, token)),
    "gated delta": (S, token) => {
      const left = scaleMatrix(token.alpha, S);
      return write(left, token.k, correction(left, token));
    },
  };
  const names = Object.keys(rules);

  // --- What one can change ---

  const steps = ui.row("explorable-stays").steps("t", {label: "after token t", count: N, value: N});
  const asked = ui.choice("asked", {
    label: "ask for the key of token", value: "1", options: Object.fromEntries(every.map(j => [j, j])),
  });
  const now = ui.text("");
  const history = ui.row(), saying = ui.row(), inputs = ui.row();
  const knobs = inputs.group("The knobs"), stream = inputs.fold("The stream");
  const share = x => number(x, 2);
  const gamma = knobs.slider("gamma", {label: "decay: γ", min: 0.05, max: 1, step: 0.05, value: 0.5, show: share});
  const beta = knobs.slider("beta", {label: "delta rules: β", min: 0, max: 2, step: 0.05, value: 1, show: share});
  const closes = knobs.slider("closes", {
    label: "gate closes at", min: 0, max: N, value: N, show: t => (t ? `token ${t}` : "never")});
  const alpha = knobs.slider("alpha", {label: "to α", min: 0, max: 1, step: 0.05, value: 0.1, show: share});
  const channels = knobs.choice("channels", {
    label: "in channels", value: "all", options: {all: "1 and 2", first: "1", second: "2"},
  });
  knobs.text("Gated delta has one gate for all channels.");
  knobs.startAgain();

  const lines = stream.row("explorable-tight");
  const keys = lines.numbers("keys", {
    label: "keys, −9 to 9", rows: every.map(j => `token ${j}`), columns: ["channel 1", "channel 2"],
    values: start.keys, min: -9, max: 9, step: 0.1,
  });
  const values = lines.numbers("values", {
    label: "values", rows: every.map(j => `token ${j}`), columns: [""], heads: false, values: start.values,
  });

  const weights = ui.matrix("weights", {
    label: "the weight of each token in the read", rows: every.map(j => `token ${j}`), columns: names, wide: true});
  const sums = ui.matrix("sums", {
    label: "the state S; weights times values", columns: names, wide: true});

  // --- The stream through the rules ---

  // Every rule is linear in the values. With unit vectors in their place, column j of S is what the
  // write of token j has become, and a read gives the weight of each token.
  const token = (k, j) => {
    const gate = j + 1 === closes.value ? alpha.value : 1;
    return {
      k, v: every.map(i => Number(i === j + 1)), gamma: gamma.value, beta: beta.value, alpha: gate,
      gates: {all: [gate, gate], first: [gate, 1], second: [1, gate]}[channels.value],
    };
  };
  const through = rule => keys.value.map(token).reduce(
    (all, one) => [...all, rule(all.at(-1), one)], [zeros(2, N)]);  // S_0 ... S_N, each (2, N)

  // Whose weight counts for what: the token that is asked for, others with its key, other keys.
  const kinds = ["own", "same", "other"];
  const colors = {own: "blue", same: "green", other: "gray"};
  const same = (a, b) => a.every((x, c) => x === b[c]);
  const kind = j => (j === asked.value - 1 ? "own" : same(keys.value[j], keys.value[asked.value - 1]) ? "same" : "other");
  const split = row => Object.fromEntries(kinds.map(which =>
    [which, sum(row.map((w, j) => (kind(j) === which ? w * values.value[j][0] : 0)))]));

  // For each rule the states, and after each token the weights and the parts of what is read.
  const compute = () => Object.fromEntries(names.map(name => {
    const all = through(rules[name]), q = keys.value[asked.value - 1];
    const rows = all.map(S => read(S, q).map(w => (Math.abs(w) < 1e-9 ? 0 : w)));  // 1 − 1 may leave 1e-16
    return [name, {states: all, weights: rows, parts: rows.map(split)}];
  }));
  const total = part => sum(Object.values(part));

  // The value that was written last at the key, up to token t; undefined before the first.
  const lastWritten = t => values.value.filter((_, j) => j < t && kind(j) !== "other").at(-1)?.[0];

  // --- The drawing: what the key reads after each token, one panel for each rule ---

  const legend = {
    own: () => `token ${asked.value}`, same: () => "same key", other: () => "other keys",
    all: () => "in all", last: () => "last written",
  };
  const signs = {
    all: (x, y) => ["circle", {cx: x + 6, cy: y - 4, r: 3, class: "ink"}],
    last: (x, y) => ["path", {d: `M ${x} ${y - 4} h 14`, class: "line vermilion"}],
  };
  const fit = x => (Math.abs(x) < 1e4 ? number(x, 1) : scientific(x, 1));  // in a third of a phone
  const across = width => (width > 540 ? 5 : 3);
  const places = {5: [0, 0.2, 0.4, 0.6, 0.8], 3: [0, 0.3, 0.63]};  // of the words of the legend
  const panelHeight = 152, top = width => (width > 540 ? 24 : 46);
  const paint = width => {
    const found = compute(), t = steps.value, shapes = [];
    Object.entries(legend).forEach(([which, words], i) => {
      const column = i % across(width), line = Math.floor(i / across(width));
      const x = width * places[across(width)][column] + 2, y = 16 + 21 * line;
      shapes.push(signs[which] ? signs[which](x, y) : ["rect", {x, y: y - 10, width: 12, height: 12, class: colors[which]}]);
      shapes.push(["text", {x: x + 19, y}, words()]);
    });
    const everyPart = Object.values(found).flatMap(({parts}) => parts);
    const targets = every.map(lastWritten).filter(x => x !== undefined);
    const high = Math.max(1e-9, ...targets, ...everyPart.map(part => sum(Object.values(part).map(x => Math.max(x, 0)))));
    const low = Math.min(0, ...targets, ...everyPart.map(part => sum(Object.values(part).map(x => Math.min(x, 0)))));
    names.forEach((name, i) => {
      const wide = width / across(width), left = (i % across(width)) * wide + 2, right = left + wide - 12;
      const upper = top(width) + Math.floor(i / across(width)) * panelHeight;
      const step = (right - left) / N;
      const y = x => upper + 134 - 92 * (x - low) / (high - low);
      shapes.push(
        ["text", {x: left, y: upper + 15, class: "bold"}, name],
        ["text", {x: left, y: upper + 33}, `${wide > 110 ? "reads " : ""}${fit(total(found[name].parts[t]))}`],
        ["path", {class: "axis", d: `M ${left} ${y(0)} H ${right}`}]);
      for (const u of every) {
        const x = left + (u - 1) * step;
        shapes.push(["text", {x: x + step / 2, y: upper + 149, class: `middle ${u === t ? "bold" : "quiet"}`}, u]);
        if (u > t) continue;
        let up = 0, down = 0;
        for (const which of kinds) {
          const part = found[name].parts[u][which];
          const from = part > 0 ? up : down;
          if (part > 0) up += part; else down += part;
          const [a, b] = [y(Math.max(from, from + part)), y(Math.min(from, from + part))];
          if (part) shapes.push(["rect", {
            x: x + 1.5, y: a, width: step - 3, height: b - a, class: colors[which], "fill-opacity": u === t ? 1 : 0.45,
            "stroke-width": 0}]);
        }
        if (up && down) shapes.push(["circle", {cx: x + step / 2, cy: y(up + down), r: 3, class: "ink"}]);
        const target = lastWritten(u);
        if (target !== undefined) shapes.push(["path", {d: `M ${x} ${y(target)} h ${step}`, class: "line vermilion"}]);
      }
    });
    return {shapes, label: `What the key of token ${asked.value} reads after each token. ` +
      names.map(name => `${name}: ${compact(total(found[name].parts[t]), 1)}`).join(", ")};
  };
  history.drawing("history", {
    paint, height: width => top(width) + panelHeight * Math.ceil(names.length / across(width)) + 4});
  saying.sentence();

  // --- The numbers ---

  const story = (t, found) => {
    const j = asked.value, reads = name => compact(total(found[name].parts[t]), 1);
    if (!t) return "No token is written yet: every state is 0, and every key reads 0.";
    const last = lastWritten(t);
    if (same(keys.value[j - 1], [0, 0])) return `The key of token ${j} is 0, and reads 0 from any state.`;
    const sentence = `the plain sum reads ${reads("plain")}, the delta rule ${reads("delta")}.`;
    if (last === undefined) return `After token ${t} nothing is written at the key of token ${j} yet; ${sentence}`;
    return `After token ${t} the value written last at the key of token ${j} is ${String(last).replace("-", "−")}; ${sentence}`;
  };
  const grows = t => {
    const far = keys.value.slice(0, t).findIndex(k => beta.value * dot(k, k) > 2 + 1e-9);
    return far < 0 ? "" : ` At token ${far + 1} β |k|² is ${compact(beta.value * dot(keys.value[far], keys.value[far]), 2)}, ` +
      "above 2: the delta rules go further from the value than they were.";
  };

  ui.redraw(() => {
    const found = compute(), t = steps.value, written = j => j < t;
    const column = part => names.map(name => part(found[name]));
    weights.show(every.map((_, j) => column(one => one.weights[t][j])), {
      text: (w, j) => (written(j) ? w && compact(w, 2) : ""),
      mark: j => (j === t - 1 ? "new" : ""),
    });
    const S = c => column(one => dot(one.states[t][c], values.value.map(([v]) => v)));
    sums.show([S(0), S(1), ...kinds.map(which => column(one => one.parts[t][which])), column(one => total(one.parts[t]))], {
      text: x => compact(x, 1), tint: false,
      heads: [["S, row 1", "S, row 2", legend.own(), legend.same(), legend.other(), "reads"], names],
      mark: i => (i === 5 ? "read" : ""),
    });
    now.show(t ? `Token ${t} writes [${keys.value[t - 1].join(", ")}] → ${values.value[t - 1]}`.replaceAll("-", "−") +
      (t === closes.value ? "; the gate closes." : ".") : "The states are empty.");
    ui.say(story(t, found) + grows(t));
  });
});
