// A key is written, and later written again: what it reads from a plain sum, and from other rules.

"use strict";

explorable("fig-token-weights", "The key of token 1 is written again: what does it read?", ui => {
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

  const steps = ui.row("explorable-stays").steps("t", {
    label: "after token t", count: N, value: 1, every: 1800,
    forward: t => shown().forEach(name => ui.fly(part(stream, `token-${t}`), part(panels[name].drawing, `S-${id(name)}`), "blue")),
  });
  const id = name => name.replace(" ", "-");
  const part = (drawing, name) => drawing.svg.querySelector(`[data-name="${name}"]`);
  const streamBox = ui.row(), panelBox = ui.row("explorable-panels");
  ui.sentence();
  const others = ui.switches("rules", {label: "Other rules:", options: {decay: "decay", gate: "gate", "gated delta": "gated delta"}});
  const shown = () => names.filter(name => name === "plain" || name === "delta" || others.value.includes(name));

  const TITLES = {plain: "plain sum", decay: "decay", gate: "gate", delta: "delta rule", "gated delta": "gated delta"};
  const panels = Object.fromEntries(["plain", "delta", "decay", "gate", "gated delta"].map(name => {
    const inner = panelBox.group(TITLES[name]);
    return [name, {inner, read: inner.big(`reads-${id(name)}`), picture: inner.row()}];
  }));
  const share = x => number(x, 2);
  const gamma = panels.decay.inner.slider("gamma", {label: "γ", min: 0.05, max: 1, step: 0.05, value: 0.5, show: share});
  const beta = panels.delta.inner.slider("beta", {label: "β", min: 0, max: 2, step: 0.05, value: 1, show: share});
  const gate = panels.gate.inner.row("explorable-tight");  // its knobs, which gated delta has as well
  const closes = gate.slider("closes", {
    label: "closes at", min: 0, max: N, value: N, show: t => (t ? `token ${t}` : "never")});
  const alpha = gate.slider("alpha", {label: "to α", min: 0, max: 1, step: 0.05, value: 0.1, show: share});
  const channels = gate.choice("channels", {
    label: "channels", value: "all", options: {all: "1 and 2", first: "1", second: "2"},
  });
  panels["gated delta"].inner.text("With β as the delta rule has it, and one gate for both channels.");

  ui.text("Bars: what the key read after each token, in the colors of the tokens that it comes from. Vermilion line: "
    + "the value written there last.");

  const change = ui.fold("Ask for another key, or type another stream");
  const asked = change.choice("asked", {
    label: "ask for the key of token", value: "1", options: Object.fromEntries(every.map(j => [j, j])),
  });
  const lines = change.row("explorable-tight");
  const keys = lines.numbers("keys", {
    label: "keys", rows: every.map(j => `token ${j}`), columns: ["channel 1", "channel 2"],
    values: start.keys, min: -9, max: 9, step: 0.1,
  });
  const values = lines.numbers("values", {
    label: "values", rows: every.map(j => `token ${j}`), columns: [""], heads: false, values: start.values,
  });
  const tables = ui.fold("The numbers of all five rules");
  const weights = tables.matrix("weights", {
    label: "the weight of each token in the read", rows: every.map(j => `token\u00a0${j}`), columns: names, wide: true});
  const sums = tables.matrix("sums", {
    label: "the state S; weights times values", columns: names, wide: true});
  ui.startAgain();

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

  let found;
  ui.redraw(() => {
    found = compute();
    for (const name of names) panels[name].inner.box.hidden = !shown().includes(name);
    const place = panels[shown().includes("gate") ? "gate" : "gated delta"].inner.box;
    if (gate.box.parentElement !== place) place.append(gate.box);
  });

  // --- The stream: keys and values, in the colors that their parts of a read have ---

  const height = 22;
  const stream = streamBox.drawing("stream", {height: 3 * height + 26, paint: width => {
    const t = steps.value, left = 46, column = (width - left) / N, cell = Math.min(58, column - 6);
    const shapes = ["key", "value"].map((words, i) =>
      ["text", {x: 0, y: 20 + (i ? 2.5 : 1) * height + 4, class: "quiet small"}, words]);
    every.forEach((j, i) => {
      const x = left + i * column, color = colors[kind(i)], middle = x + cell / 2;
      shapes.push(
        ["text", {x: middle, y: 13, class: `middle small ${j === t ? "bold" : "quiet"}`}, width > 500 ? `token ${j}` : j],
        ...cells([...keys.value[i].map(x => [x]), values.value[i]], {x, y: 20, cell, height, color: `${color} ${j > t ? "later" : ""}`, text: fit, name: `token-${j}`}),
        j === t && ["rect", {x: x - 1.5, y: 18.5, width: cell + 3, height: 3 * height + 3, class: "frame"}]);
    });
    return {shapes, label: `The stream: ${every.map(j => `token ${j}, key ${listed(keys.value[j - 1])}, value ${brief(values.value[j - 1][0])}`).join("; ")}.`};
  }});

  // --- A panel for each rule: its state, and what the key has read from it after each token ---

  const scale = () => {
    const parts = shown().flatMap(name => found[name].parts), targets = every.map(lastWritten).filter(x => x !== undefined);
    const most = sign => Math.max(...targets.map(x => sign * x), ...parts.map(part => sum(Object.values(part).map(x => Math.max(sign * x, 0)))));
    return [-Math.max(0, most(-1)), Math.max(1e-9, most(1))];
  };
  const tall = 128;
  const paint = name => width => {
    const t = steps.value, {states, parts} = found[name], shapes = [], [low, high] = scale();
    const cell = Math.min(46, 0.3 * width), left = cell + 12, step = (width - left - 2) / N;
    const y = x => tall - 20 - (tall - 26) * (x - low) / (high - low);
    const S = states[t].map(row => [dot(row, values.value.map(([v]) => v))]);
    shapes.push(
      ["text", {x: cell / 2, y: 34, class: "middle small quiet"}, `S${subscript(t)}`],
      ...cells(S, {x: 0, y: 40, cell, height, color: "blue", text: fit, name: `S-${id(name)}`}),
      ["path", {class: "axis", d: `M ${left} ${y(0)} H ${width - 2}`}]);
    for (const u of every) {
      const x = left + (u - 1) * step;
      shapes.push(["text", {x: x + step / 2, y: tall - 4, class: `middle small ${u === t ? "bold" : "quiet"}`}, u]);
      if (u > t) continue;
      let up = 0, down = 0;
      for (const which of kinds) {
        const one = parts[u][which], from = one > 0 ? up : down;
        if (one > 0) up += one; else down += one;
        const [a, b] = [y(Math.max(from, from + one)), y(Math.min(from, from + one))];
        if (one) shapes.push(["rect", {
          x: x + 1.5, y: a, width: step - 3, height: b - a, class: `lit ${colors[which]}`, "fill-opacity": u === t ? 1 : 0.45}]);
      }
      if (up && down) shapes.push(["circle", {cx: x + step / 2, cy: y(up + down), r: 3, class: "ink"}]);
      const target = lastWritten(u);
      if (target !== undefined) shapes.push(["path", {d: `M ${x} ${y(target)} h ${step}`, class: "line vermilion"}]);
    }
    return {shapes, label: `${TITLES[name]}: after token ${t} the state is ${listed(S.flat(), fit)}, and the key of token ${asked.value} reads ${compact(total(parts[t]), 1)}.`};
  };
  for (const name of names) panels[name].drawing = panels[name].picture.drawing(`bars-${id(name)}`, {height: tall, paint: paint(name)});

  const shownValue = x => String(x).replace("-", "−");
  const story = t => {
    const j = asked.value, key = keys.value[j - 1];
    if (!t) return "No token is written yet: every state is 0, and every key reads 0.";
    if (same(key, [0, 0])) return `The key of token ${j} is 0, and reads 0 from any state.`;
    const last = lastWritten(t), wrote = `Token ${t} writes ${shownValue(values.value[t - 1][0])} to`;
    const again = every.some(u => u < t && kind(u - 1) !== "other") ? " again" : "";
    const write = kind(t - 1) !== "other" ? `${wrote} the key of token ${j}${again}.`
      : Math.abs(dot(keys.value[t - 1], key)) > 1e-9 ? `${wrote} a key that overlaps that of token ${j}.`
        : `${wrote} a key at a right angle to that of token ${j}.`;
    const reads = name => compact(total(found[name].parts[t]), 1).replace(/\.0$/, "");
    return `${write} Now the key of token ${j} reads ${reads("plain")} from the plain sum and ${reads("delta")} by the delta rule; `
      + (last === undefined ? "nothing is written there yet." : `written there last was ${shownValue(last)}.`);
  };
  const grows = t => {
    const far = keys.value.slice(0, t).findIndex(k => beta.value * dot(k, k) > 2 + 1e-9);
    return far < 0 ? "" : ` At token ${far + 1} β |k|² is ${compact(beta.value * dot(keys.value[far], keys.value[far]), 2)}, ` +
      "above 2: the delta rules go further from the value than they were.";
  };

  ui.redraw(() => {
    const t = steps.value, written = j => j < t, j = asked.value;
    const column = part => names.map(name => part(found[name]));
    weights.show(every.map((_, j) => column(one => one.weights[t][j])), {
      text: (w, j) => (written(j) ? w && compact(w, 2) : ""),
      mark: j => (j === t - 1 ? "new" : ""),
    });
    const S = c => column(one => dot(one.states[t][c], values.value.map(([v]) => v)));
    sums.show([S(0), S(1), ...kinds.map(which => column(one => one.parts[t][which])), column(one => total(one.parts[t]))], {
      text: x => compact(x, 1), tint: false,
      heads: [["S, row 1", "S, row 2", `token ${j}`, "same key", "other keys", "reads"], names],
      mark: i => (i === 5 ? "read" : ""),
    });
    for (const name of names) {
      const x = total(found[name].parts[t]);
      panels[name].read.show(Math.abs(x) < 1e4 ? number(x, 1) : scientific(x, 1), `read by the key of token ${j}`);
    }
    const closing = t === closes.value && shown().some(name => name.startsWith("gate")) ? " The gate closes." : "";
    ui.say(story(t) + closing + grows(t));
  });
});
