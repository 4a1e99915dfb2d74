// One token after the other in three ways: everything computed again, with a KV cache, with (S, z).

"use strict";

// --- The mathematics: three ways to the same output ---------------------------------------------

// The output for one query over the keys and values so far: a weighted mean of the values.
const readAll = (q, keys, values) => {
  const weights = keys.map(k => dot(q, k));
  return vectorTimesMatrix(weights, values).map(x => x / sum(weights));
};

const decoding = {
  // Keeps the text. All keys, values and outputs are made again; the last output is wanted.
  recompute: {
    start: () => ({text: []}),
    step({text}, token) {
      const tokens = [...text, token];
      const keys = tokens.map(x => relu(x.k)), values = tokens.map(x => x.v);
      const outputs = tokens.map((x, i) => readAll(relu(x.q), keys.slice(0, i + 1), values.slice(0, i + 1)));
      return {kept: {text: tokens}, output: outputs.at(-1)};
    },
    // Of step t, in numbers, with p = D + M of a key and its value: what it moves and computes.
    counts: (t, {p}) => ({reads: t, writes: t * p, keeps: 0, operations: t * t * p}),
  },
  // Keeps keys and values; one of each is added, and all are read.
  cache: {
    start: () => ({keys: [], values: []}),
    step({keys, values}, token) {
      const kept = {keys: [...keys, relu(token.k)], values: [...values, token.v]};
      return {kept, output: readAll(relu(token.q), kept.keys, kept.values)};
    },
    counts: (t, {p}) => ({reads: t * p, writes: p, keeps: t * p, operations: t * p}),
  },
  // Keeps their sums: S, of the outer products, and z, of the keys.
  state: {
    start: D => ({S: zeros(D, D), z: Array(D).fill(0)}),
    step({S, z}, token) {
      const q = relu(token.q), k = relu(token.k);
      const kept = {S: addMatrices(S, outer(k, token.v)), z: addVectors(z, k)};
      return {kept, output: vectorTimesMatrix(q, kept.S).map(x => x / dot(q, kept.z))};
    },
    counts: (t, {s}) => ({reads: s, writes: s, keeps: s, operations: 2 * s}),  // s = C (M + 1)
  },
};

// One head with C = D = M.
const sizesOf = D => ({p: D + D, s: D * (D + 1)});
const operationsSoFar = (way, t, sizes) =>
  sum(Array.from({length: t}, (_, i) => decoding[way].counts(i + 1, sizes).operations));

// From which token on the cache is as large as S, as large as S and z, and a step with it dearer.
const passing = D => ({
  S: Math.ceil(D * D / (D + D)),
  Sz: Math.ceil(D * (D + 1) / (D + D)),
  operations: Math.floor(2 * D * (D + 1) / (D + D)) + 1,
});

// --- The page ------------------------------------------------------------------------------------

explorable("fig-three-ways", "Play: what does one more token cost?", ui => {
  const LAST = 100;
  const WAYS = {recompute: ["recompute", "vermilion"], cache: ["KV cache", "blue"], state: ["state", "green"]};
  const TOKENS = [[[1, 0], [10, 20]], [[0, 1], [30, 40]], [[1, 1], [50, 60]]].map(([k, v]) => ({q: k, k, v}));
  const tokenAt = t => TOKENS[(t - 1) % 3];  // three tokens, over and over

  const t = ui.row("explorable-stays").steps("t", {
    label: "token t", first: 1, count: LAST, every: 180,
    forward: () => {
      const part = name => drawing.svg.querySelector(`[data-name="${name}"]`);
      for (const way of ["cache", "state"]) ui.fly(part("token"), part(`made-${way}`), "vermilion", 500);
    },
  });
  const D = ui.row().slider("D", {label: "width D = M", values: [2, 4, 8, 16, 32, 64], value: 8});

  // --- What is kept, and made at this token: three piles to one scale ---

  const area = width => (width > 500 ? 156 : 104), above = 46, FITS = [12, 24, 48, LAST];  // pixels; tokens that fit
  const side = width => Math.min(area(width) / FITS.find(rows => t.value <= rows), 14, (width / 3 - 12) / (2 * D.value + 0.4));

  // A block of numbers that stands at y, `rows` high and `across` wide; with cells where there is room.
  const block = (x, y, rows, across, size, kind, made) => {
    const rectangle = (x, y, width, height, extra) => ["rect", {x, y, width, height, class: `${kind} ${extra}`}];
    const shapes = [rectangle(x, y - rows * size, across * size, rows * size, made ? "lit" : "pale lit")];
    if (size >= 5)
      for (let i = 0; i < rows; i++)
        for (let j = 0; j < across; j++)
          shapes.push(rectangle(x + j * size, y - (i + 1) * size, size, size, `cell ${made ? "made" : ""}`));
    return shapes;
  };
  // Keys and values, a row for each token, the newest on top; the newest `made` are of this step.
  const rows = (x, base, size, made) => [0, (D.value + 0.4) * size].flatMap(shift => [
    ...(made < t.value ? block(x + shift, base, t.value - made, D.value, size, "blue") : []),
    ...block(x + shift, base - (t.value - made) * size, made, D.value, size, "vermilion", true),
  ]);
  const piles = {
    recompute: {across: d => 2 * d + 0.4, high: () => t.value, made: () => t.value, shapes: (x, base, size) => rows(x, base, size, t.value)},
    cache: {across: d => 2 * d + 0.4, high: () => t.value, made: () => 1, shapes: (x, base, size) => rows(x, base, size, 1)},
    state: {across: d => d + 1.4, high: d => d, made: d => d, shapes: (x, base, size) => [  // written anew
      ...block(x, base, D.value, D.value, size, "green", true), ...block(x + (D.value + 0.4) * size, base, D.value, 1, size, "green", true),
    ]},
  };
  const drawing = ui.drawing("cells", {height: width => above + area(width) + 86, paint: width => {
    const panel = width / 3, size = side(width), base = above + area(width), d = D.value, sizes = sizesOf(d);
    const token = {x: width / 2 - (d + 0.2) * size, y: 34};
    const shapes = [
      ["text", {x: width / 2, y: 14, class: "middle quiet"}, `token ${t.value}: a key and a value`],
      ...block(token.x, token.y, 1, d, size, "vermilion", true), ...block(token.x + (d + 0.4) * size, token.y, 1, d, size, "vermilion", true),
      ["rect", {x: token.x, y: token.y - size, width: (2 * d + 0.4) * size, height: size, class: "outline", "data-name": "token"}],
      ["path", {class: "axis", d: `M 0 ${base + 1} H ${width}`}],
    ];
    Object.entries(WAYS).forEach(([way, [name, color]], column) => {
      const middle = (column + 0.5) * panel, {keeps, operations} = decoding[way].counts(t.value, sizes);
      const {across, high, made, shapes: pile} = piles[way], x = middle - across(d) * size / 2;
      shapes.push(...pile(x, base, size),
        ["rect", {x, y: base - high(d) * size, width: across(d) * size, height: made(d) * size, class: "outline", "data-name": `made-${way}`}],
        ["text", {x: middle, y: base + 20, class: `middle bold ${color}`}, name],
        ["text", {x: middle, y: base + 39, class: "middle small"}, `${number(operations)} ${width > 500 ? "operations" : "ops"}`],
        ["text", {x: middle, y: base + 56, class: "middle small quiet"}, way === "recompute" ? "keeps the text" : `keeps ${number(keeps)}`]);
    });
    [["lit", "made now"], ["pale lit", "kept, only read"]].forEach(([kind, words], i) => shapes.push(
      ["rect", {x: width / 2 * i + 1, y: base + 68, width: 12, height: 12, class: `blue ${kind}`}],
      ["text", {x: width / 2 * i + 19, y: base + 79, class: "small"}, words]));
    return {shapes, label: `Token ${t.value}, width ${d}, to one scale. Recompute: ${t.value} keys and values, all made now. `
      + `Cache: ${t.value - 1} from before, and one more. State: S, ${d} by ${d}, and z.`};
  }});
  ui.sentence();

  // --- And against t, both axes logarithmic ---

  const chosen = ui.choice("curve", {label: "Against t:", value: "operations", options: {
    operations: "operations of a step", total: "since token 1", keeps: "numbers kept",
  }});
  const curves = {
    operations: {
      at: (way, t, sizes) => decoding[way].counts(t, sizes).operations,
      grows: {recompute: "as t²", cache: "as t", state: "not at all"},
    },
    total: {at: operationsSoFar, grows: {recompute: "as t³", cache: "as t²", state: "as t"}},
    keeps: {
      at: (way, t, sizes) => decoding[way].counts(t, sizes).keeps,
      grows: {recompute: "0", cache: "as t", state: "not at all"},
    },
  };
  ui.drawing("curves", {height: 210, paint: width => {
    const left = 44, right = width - 128, top = 14, bottom = 178;
    const {at, grows} = curves[chosen.value], sizes = sizesOf(D.value);
    const high = Math.log10(2 * Math.max(...Object.keys(WAYS).map(way => at(way, LAST, sizes))));
    const low = Math.log10(0.5 * Math.min(...Object.keys(WAYS).map(way => at(way, 1, sizes)).filter(Boolean)));
    const across = t => left + (right - left) * Math.log10(t) / Math.log10(LAST);
    const up = count => (count ? bottom - (bottom - top) * (Math.log10(count) - low) / (high - low) : bottom);
    const shapes = [["path", {class: "axis", d: `M ${left} ${top} V ${bottom} H ${right}`}]];
    for (const tick of width > 360 ? [1, 3, 10, 30, 100] : [1, 10, 100]) shapes.push(
      ["path", {class: "axis", d: `M ${across(tick)} ${bottom} v 4`}],
      ["text", {x: across(tick), y: bottom + 18, class: "middle quiet"}, tick]);
    for (let power = Math.ceil(low); power <= high; power += Math.ceil((high - low) / 5)) shapes.push(
      ["path", {class: "axis", d: `M ${left} ${up(10 ** power)} H ${right}`, "stroke-dasharray": "2 4"}],
      ["text", {x: left - 6, y: up(10 ** power) + 4, class: "end quiet"}, powerOfTen(power)]);
    shapes.push(["text", {x: right + 20, y: bottom + 18, class: "quiet"}, "token t"],
      ["path", {class: "axis", d: `M ${across(t.value)} ${top} V ${bottom}`}]);
    const ends = [];  // heights of the words on the right, at least a line apart
    Object.entries(WAYS).forEach(([way, [name, color]], i) => {
      const points = Array.from({length: LAST}, (_, i) => `${across(i + 1)} ${up(at(way, i + 1, sizes))}`);
      const end = up(at(way, LAST, sizes));
      const free = [0, 16, -16, 32, -32].map(shift => end + shift)
        .find(y => y < bottom + 8 && ends.every(other => Math.abs(other - y) >= 16));
      ends.push(free);
      shapes.push(
        ["path", {class: `line ${color} ${["", "dashed", "dotted"][i]}`, d: `M ${points.join(" L ")}`}],
        ["circle", {cx: across(t.value), cy: up(at(way, t.value, sizes)), r: 5, class: color}],
        ["text", {x: right + 8, y: free + 4, class: color}, `${way}: ${grows[way]}`]);
    });
    return {shapes, label: `${chosen.value === "keeps" ? "Numbers kept" : "Operations"} against the token t, both axes logarithmic: `
      + Object.entries(WAYS).map(([way, [name]]) => `${name} grows ${grows[way]}`).join(", ") + "."};
  }});

  // --- The same, counted ---

  const more = ui.fold("The counts"), ways = Object.keys(WAYS), columns = Object.values(WAYS).map(([name]) => name);
  const table = more.matrix("counts", {
    label: "How many numbers, and how many operations", wide: true,
    rows: ["reads", "writes", "keeps", "operations", "since token 1"], columns,
  });
  const outputs = more.matrix("outputs", {
    label: "The output for tokens of width 2: the same each way", wide: true, rows: ["entry 1", "entry 2"], columns,
  });
  const first = {
    S: more.readout("passes-S", "first token at which the cache is as large as S"),
    Sz: more.readout("passes-Sz", "… as large as S and z"),
    operations: more.readout("passes-operations", "first token at which a step with the cache is dearer"),
  };
  const showCounts = sizes => {
    const each = ways.map(way => decoding[way].counts(t.value, sizes));
    const matrix = ["reads", "writes", "keeps", "operations"].map(row => each.map(counts => counts[row]));
    matrix.push(ways.map(way => operationsSoFar(way, t.value, sizes)));
    const inWords = {"0,0": x => several(x, "token"), "2,0": () => "0, the text"};
    table.show(matrix, {tint: false, text: (x, i, j) => (inWords[[i, j]] || number)(x)});
    outputs.show(transpose(ways.map(run)), {tint: false, digits: 1});
  };
  // All steps up to this token.
  const run = way => {
    let kept = decoding[way].start(2), output;
    for (let i = 1; i <= t.value; i++) ({kept, output} = decoding[way].step(kept, tokenAt(i)));
    return output;
  };
  ui.startAgain();

  ui.redraw(() => {
    const sizes = sizesOf(D.value), {cache, state} = decoding;
    showCounts(sizes);
    for (const [what, token] of Object.entries(passing(D.value))) first[what].show(token);
    const cached = cache.counts(t.value, sizes), recurrent = state.counts(t.value, sizes);
    ui.say(cached.keeps < recurrent.keeps
      ? `Token ${t.value}: the cache, ${number(cached.keeps)} numbers, is smaller than the state, ${number(recurrent.keeps)}.`
      : cached.operations <= recurrent.operations
        ? `Token ${t.value}: the cache is as large as the state or larger, but a step with it is not dearer yet.`
        : `Token ${t.value}: the cache is larger, and dearer to read. The state has not grown.`);
  });
});
