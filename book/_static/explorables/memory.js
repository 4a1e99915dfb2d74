// A memory of outer products: write pairs one by one, read with any query, and see what of the
// answer was asked for (signal) and what came along (crosstalk).

"use strict";

explorable("fig-signal-crosstalk", "Drag a key: how much of the read is signal?", ui => {

  // --- The mathematics of the chapter ---

  const empty = (D, M) => ({S: zeros(D, M), z: Array(D).fill(0)});
  const write = ({S, z}, k, v) => ({S: addMatrices(S, outer(k, v)), z: addVectors(z, k)});
  const read = ({S}, q) => vectorTimesMatrix(q, S);
  const normalizer = ({z}, q) => dot(q, z);

  // The same read, token by token: (q · kⱼ) vⱼ for every stored token.
  const contributions = (K, V, q) => K.map((k, j) => V[j].map(entry => dot(q, k) * entry));

  // --- What the reader sets ---

  const START = {K: [[1, 0], [0, 1], [1, 1]], V: [[10, 20], [30, 40], [50, 60]], t: 1};
  const ANY = [0.5, 0.5];  // the first query that is no key
  const COLORS = ["blue", "pink", "vermilion"];
  const token = (letter, j) => `${letter}${subscript(j)}`;
  const names = letter => [1, 2, 3].map(j => token(letter, j));

  const steps = ui.row("explorable-stays").steps("t", {
    label: "tokens written", count: 3, value: START.t, every: 1800,
    forward: t => ui.fly(added.table, after.table, COLORS[t - 1]),
  });
  const top = ui.row();
  const left = top.group("Drag the keys"), right = top.group("Read");
  left.box.style.flex = "1 1 15rem";
  right.box.style.flex = "2 1 19rem";
  const choices = right.row("explorable-tight");
  const asked = choices.choice("asked", {
    label: "with", options: {0: "k₁", 1: "k₂", 2: "k₃", any: "any q"}, value: "0",
  });
  const presets = ui.row("explorable-tight");
  const more = ui.fold("The numbers, and others to type");
  const way = more.choice("way", {
    label: "read", options: {plain: "plain", normalized: "normalized"}, value: "plain",
  });
  const table = more.row("explorable-roomy"), tables = more.row("explorable-tight");
  const keys = tables.numbers("K", {label: "keys", rows: names("k"), values: START.K, min: -2, max: 2, step: 0.25});
  const values = tables.numbers("V", {label: "values", rows: names("v"), values: START.V});
  const query = tables.numbers("q", {label: "query", rows: ["q"], values: [START.K[0]], min: -2, max: 2, step: 0.25});

  // The query is a key, and follows it, until the reader types or drags another one.
  const same = (a, b) => a.every((x, i) => x === b[i]);
  let seen = START.K[0], was = "0";
  ui.redraw(() => {
    if (!same(query.value[0], seen)) asked.value = "any";
    else if (asked.value !== "any") query.value = [keys.value[asked.value]];
    else if (was !== "any") query.value = [ANY];
    [seen, was] = [query.value[0], asked.value];
  });
  const signal = () => (asked.value === "any" ? -1 : Number(asked.value));  // the token asked for
  const role = j => (j >= steps.value ? "unwritten" : signal() < 0 ? "from" : signal() === j ? "signal" : "crosstalk");

  const memories = () => {  // before the first write, after it, ...
    const K = keys.value, V = values.value;
    const all = [empty(2, 2)];
    for (let t = 0; t < steps.value; t++) all.push(write(all[t], K[t], V[t]));
    return all;
  };
  // What every token brings to the read, the sum as the memory gives it, and what divided both.
  const answer = () => {
    const t = steps.value, q = query.value[0], memory = memories()[t];
    const weights = keys.value.slice(0, t).map(k => dot(q, k));
    const parts = contributions(keys.value.slice(0, t), values.value.slice(0, t), q);
    if (way.value === "plain") return {weights, parts, o: read(memory, q)};
    const divisor = normalizer(memory, q);
    if (divisor === 0)  // no weights sum to one: lesson_code returns 0
      return {weights: weights.map(() => NaN), parts: parts.map(part => part.map(() => NaN)), o: [0, 0], divisor};
    return {
      weights: weights.map(x => x / divisor), parts: scaleMatrix(1 / divisor, parts),
      o: read(memory, q).map(x => x / divisor), divisor,
    };
  };

  // --- The plane of keys ---

  const {reach, size, unit, toPixels, fromPixels, snap, step, grid, arrow, names: tipNames} = plane(2);

  const drawing = left.drawing("plane", {height: size, paint: width => {
    const q = query.value[0], [cx, cy] = toPixels(0, 0, width);
    return {
      label: `The plane of keys. ${keys.value.map((k, j) => `${token("k", j + 1)} = ${listed(k)}`).join(", ")}, q = ${listed(q)}.`,
      shapes: [
        ...grid(width),
        ["circle", {cx, cy, r: unit(width), class: "axis"}],
        arrow(q, "green", width, "stroke-width: 9; stroke-opacity: 0.35"),
        ...keys.value.map((k, j) => arrow(k, `${COLORS[j]} ${j < steps.value ? "" : "dashed"}`, width)),
        ...tipNames([
          ...keys.value.map((k, j) => ({at: k, words: `${signal() === j ? "q = " : ""}${token("k", j + 1)}`, color: COLORS[j]})),
          ...(signal() < 0 ? [{at: q, words: "q", color: "green"}] : []),
        ], width),
      ],
    };
  }});
  const place = {reach, toPixels, fromPixels, snap, step};
  drawing.handle("drag-q", {
    label: "query q", color: "green", ...place, position: () => query.value[0],
    move: (x, y) => { query.value = [[x, y]]; },
  });
  START.K.forEach((_, j) => drawing.handle(`drag-k${j + 1}`, {
    label: `key ${token("k", j + 1)}`, color: COLORS[j], ...place, position: () => keys.value[j],
    move: (x, y) => {
      keys.value = keys.value.map((k, i) => (i === j ? [x, y] : k));
      steps.value = Math.max(steps.value, j + 1);  // who drags a key wants to see what it does
    },
  }));

  const preset = (name, words, {K, t}) => presets.button(name, words, () => {
    keys.value = K;
    values.value = START.V;
    steps.value = t;
    query.value = [K[0]];
    seen = K[0];
    asked.value = "0";
    way.value = "plain";
  });
  preset("reset", "start again", START);
  preset("orthogonal", "right angle", {K: [[1, 0.5], [-0.5, 1], [1, 1]], t: 2});
  preset("parallel", "nearly parallel", {K: [[1, 0.25], [1, 0], [1, 1]], t: 2});

  // --- The read ---

  const ROW = 24, TOP = 22;
  right.drawing("bars", {height: 4 * ROW + TOP + 4, paint: width => {
    const {parts, o} = answer(), t = steps.value;
    const first = 92, wide = (width - first - 12) / 2;
    const ends = [0, 1].map(m => parts.reduce((sums, part) => [...sums, sums.at(-1) + (part[m] || 0)], [0]));
    const all = [...ends.flat(), ...o];
    const low = -roundUp(-Math.min(0, ...all)), high = roundUp(Math.max(0, ...all)) || (low ? 0 : 100);
    const row = (i, words, kind) => ["text", {x: 0, y: TOP + ROW * i + 16, class: kind}, words];
    const shapes = [
      ...[0, 1, 2].map(j => row(j, `${role(j)} ${token("v", j + 1)}`, j < t ? COLORS[j] : "quiet")),
      row(3, "read o", "bold"),
    ];
    for (const m of [0, 1]) {
      const x = first + m * (wide + 12), across = value => x + wide * (value - low) / (high - low);
      const bar = (from, to, i, kind) => from !== to && ["rect", {
        x: Math.min(across(from), across(to)), y: TOP + ROW * i + 3, width: Math.abs(across(to) - across(from)),
        height: ROW - 6, class: kind,
      }];
      shapes.push(
        ["text", {x: x + wide / 2, y: 12, class: "middle quiet"}, `entry ${m + 1}`],
        ["path", {class: "axis", d: `M ${across(0)} ${TOP - 3} v ${4 * ROW + 5}`}],
        ...parts.map((_, j) =>  // from the end of a bar to the start of the next
          ["path", {class: "axis dotted", d: `M ${across(ends[m][j + 1])} ${TOP + ROW * j + 3} v ${2 * ROW - 6}`}]),
        ...parts.map((_, j) => bar(ends[m][j], ends[m][j + 1], j, `${COLORS[j]} ${signal() === j ? "" : "pale"}`)),
        bar(0, o[m], 3, "gray"));
    }
    return {shapes, label: `What each token adds to both entries of the read, which is ${listed(o)}.`};
  }});

  // --- The write ---

  const sums = right.row("explorable-roomy explorable-tight");
  const before = sums.matrix("before", {label: "S₀"});
  const added = sums.matrix("added", {label: "+ k₁v₁ᵀ"});
  const after = sums.matrix("S", {label: "= S₁"});

  right.sentence();
  const parts = table.matrix("parts", {label: ""});
  const keySum = table.matrix("z", {label: "z₁"});

  ui.redraw(() => {
    const t = steps.value, q = query.value[0], all = memories(), {weights, parts: shares, o, divisor} = answer();
    const none = rows => rows.map(row => row.map(() => NaN)), text = small;
    const changed = t ? outer(keys.value[t - 1], values.value[t - 1]) : zeros(2, 2);
    const mark = (i, j) => (changed[i][j] ? "new" : "");
    before.show(t ? all[t - 1].S : none(all[0].S), {text, caption: t ? token("S", t - 1) : " "});
    added.show(t ? changed : none(changed), {text, caption: t ? `+ ${token("k", t)} ${token("v", t)}ᵀ` : " "});
    after.show(all[t].S, {text, mark, caption: `${t ? "= " : ""}${token("S", t)}`});
    keySum.show(all[t].z.map(x => [x]), {text, tint: false, caption: token("z", t)});

    const blank = [NaN, NaN, NaN];
    const weightSum = divisor === undefined ? NaN : divisor === 0 ? 0 : 1;
    parts.show([...[0, 1, 2].map(j => (j < t ? [weights[j], ...shares[j]] : blank)), [weightSum, ...o]], {
      text, tint: false, mark: (i, j) => (i === 3 && j ? "read" : ""),
      heads: [
        [...[0, 1, 2].map(j => `${role(j)} ${token("v", j + 1)}`), "sum: read o"],
        ["weight", "entry 1", "entry 2"],
      ],
      caption: divisor === undefined ? "weight: q·kⱼ" : `weight: q·kⱼ / q·z, with q·z = ${brief(divisor)}`,
    });

    const i = signal(), others = weights.filter((_, j) => j !== i), k = token("k", i + 1);
    const crosstalk = shares.filter((_, j) => j !== i).reduce(addVectors, [0, 0]);
    const lost = divisor !== undefined && sum(weights.map(Math.abs)) > 1e9;  // they should sum to 1
    const silent = weights.every(weight => weight === 0);
    ui.say(
      t === 0 ? "Nothing is written yet: every query reads 0."
      : divisor === 0 ? "The weights sum to 0, and there is no mean with such weights: the package returns 0."
      : lost ? "The weights sum to 0 but for rounding errors: the normalized read means nothing."
      : silent ? `${i < 0 ? `q = ${listed(q)}` : i < t ? k : `${k}, not written yet,`} has the product 0 with every key written, and reads 0.`
      : i < 0 ? `q = ${listed(q, small)} reads ${listed(o, small)}, a blend of what is written.`
      : i >= t ? `${k} is not written yet: what it reads, ${listed(o, small)}, is crosstalk alone.`
      : t === 1 ? `Nothing else is written: ${k} reads ${small(weights[0])} × v₁ = ${listed(o, small)}.`
      : others.every(weight => weight === 0)
        ? `No crosstalk: ${k} has the product 0 with all other keys written. It reads ${small(weights[i])} × ${token("v", i + 1)}.`
      : weights[i] === 0 ? `No signal: ${k} is weighted 0 and the read, ${listed(o, small)}, is crosstalk alone.`
      : `Signal ${small(weights[i])} × ${token("v", i + 1)} = ${listed(shares[i], small)}, crosstalk ${listed(crosstalk, small)}: `
        + `the read is ${listed(o, small)}.`);
  });
});
