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

explorable("fig-three-ways", "Go from token to token: what does each way read, write and keep?", ui => {
  const LAST = 100;
  const WAYS = {recompute: ["recompute", "vermilion"], cache: ["KV cache", "blue"], state: ["state", "green"]};
  const TOKENS = [[[1, 0], [10, 20]], [[0, 1], [30, 40]], [[1, 1], [50, 60]]].map(([k, v]) => ({q: k, k, v}));
  const tokenAt = t => TOKENS[(t - 1) % 3];  // the three tokens of the chapter, over and over

  const t = ui.row("explorable-stays").steps("t", {label: "token t", first: 1, count: LAST, value: 3});
  const D = ui.row().slider("D", {label: "width D = M", values: [2, 4, 8, 16, 32, 64], value: 2});

  // --- What is made at this token, and what was there: to scale ---

  const AREA = 168, FITS = [6, 12, 24, 48, LAST];  // pixels, and tokens that fit into them
  const side = panel => Math.min(AREA / FITS.find(rows => t.value <= rows), 28, (panel - 16) / (2 * D.value + 0.4));

  // A block of numbers, `rows` of them as long as `across`; each in a cell where there is room.
  const block = (x, y, rows, across, size, kind, numbers) => {
    const shapes = [];
    const rectangle = (x, y, width, height, extra = "") =>
      shapes.push(["rect", {x, y, width, height, class: `${kind} ${extra}`}]);
    rectangle(x, y, across * size, rows * size, "pale");
    if (size >= 7)
      for (let i = 0; i < rows; i++)
        for (let j = 0; j < across; j++) rectangle(x + j * size, y + i * size, size, size, "cell");
    if (size >= 18 && numbers)
      numbers.forEach((row, i) => row.forEach((number, j) => shapes.push(["text", {
        x: x + (j + 0.5) * size, y: y + (i + 0.5) * size + 4, class: "middle small", style: number > 99 && "font-size: 11px"}, number])));
    return shapes;
  };
  const frame = (x, y, width, height) => ["rect", {
    x, y, width, height: Math.max(height, 1), class: "frame", style: Math.min(width, height) < 6 && "stroke-width: 1"}];

  // Keys and values so far; those from `made` on are of this step.
  const rows = (x, y, size, made) => {
    const shapes = [], d = D.value, kept = made - 1, now = t.value - kept;
    const tokens = d === 2 && Array.from({length: t.value}, (_, i) => tokenAt(i + 1));
    [["k", x], ["v", x + (d + 0.4) * size]].forEach(([name, left]) => {
      const numbers = tokens && tokens.map(token => token[name]);
      if (kept) shapes.push(...block(left, y, kept, d, size, "blue", numbers && numbers.slice(0, kept)));
      shapes.push(...block(left, y + kept * size, now, d, size, "vermilion", numbers && numbers.slice(kept)));
      shapes.push(frame(left, y + kept * size, d * size, now * size));
    });
    return shapes;
  };
  const pictures = {
    recompute: (x, y, size) => rows(x, y, size, 1),
    cache: (x, y, size) => rows(x, y, size, t.value),
    state: (x, y, size, {S, z}) => {
      const d = D.value, right = x + (d + 0.4) * size, numbers = d === 2;
      return [
        ...block(x, y, d, d, size, "green", numbers && S), frame(x, y, d * size, d * size),
        ...block(right, y, d, 1, size, "green", numbers && z.map(x => [x])), frame(right, y, size, d * size),
      ];
    },
  };
  const widths = {recompute: d => 2 * d + 0.4, cache: d => 2 * d + 0.4, state: d => d + 1.4};

  // All steps up to this token, of the tokens whose numbers are shown.
  const run = way => {
    let kept = decoding[way].start(2), output;
    for (let i = 1; i <= t.value; i++) ({kept, output} = decoding[way].step(kept, tokenAt(i)));
    return {kept, output};
  };
  ui.drawing("cells", {height: AREA + 56, paint: width => {
    const panel = width / 3, size = side(panel);
    const shapes = Object.entries(WAYS).flatMap(([way, [name]], column) => {
      const middle = (column + 0.5) * panel, {kept, output} = run(way);
      return [
        ["text", {x: middle, y: 14, class: "middle bold"}, name],
        ...pictures[way](middle - widths[way](D.value) * size / 2, 26, size, kept),
        ["text", {x: middle, y: AREA + 48, class: "middle", "data-name": `output-${way}`},
          D.value === 2 ? `${width < 450 ? "" : "o = "}${listed(output, x => number(x, 1))}` : ""],
      ];
    });
    return {shapes, label: `Token ${t.value}, width ${D.value}, to one scale. Recompute: ${t.value} keys and values, all made now. `
      + `Cache: ${t.value - 1} from before, and one more. State: S, ${D.value} by ${D.value}, and z.`
      + (D.value === 2 ? ` Each way the output is ${listed(run("state").output, x => number(x, 1))}.` : "")};
  }});
  ui.text("Framed: made at this token. Blue: kept from before, and only read. All to one scale, which halves "
    + "when the tokens no longer fit. Below, at width 2, the output.");
  ui.sentence();

  // --- The same, counted ---

  const table = ui.matrix("counts", {
    label: "How many numbers, and how many operations", wide: true,
    rows: ["reads", "writes", "keeps", "operations", "since token 1"],
    columns: Object.values(WAYS).map(([name]) => name),
  });
  const showCounts = sizes => {
    const ways = Object.keys(WAYS);
    const each = ways.map(way => decoding[way].counts(t.value, sizes));
    const matrix = ["reads", "writes", "keeps", "operations"].map(row => each.map(counts => counts[row]));
    matrix.push(ways.map(way => operationsSoFar(way, t.value, sizes)));
    const inWords = {"0,0": x => several(x, "token"), "2,0": () => "0, the text"};
    table.show(matrix, {tint: false, text: (x, i, j) => (inWords[[i, j]] || number)(x)});
  };

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
    for (const tick of [1, 3, 10, 30, 100]) shapes.push(
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

  const first = {
    S: ui.readout("passes-S", "first token at which the cache is as large as S"),
    Sz: ui.readout("passes-Sz", "… as large as S and z"),
    operations: ui.readout("passes-operations", "first token at which a step with the cache is dearer"),
  };

  ui.redraw(() => {
    const sizes = sizesOf(D.value), {cache, state} = decoding;
    showCounts(sizes);
    for (const [what, token] of Object.entries(passing(D.value))) first[what].show(token);
    const cached = cache.counts(t.value, sizes), recurrent = state.counts(t.value, sizes);
    ui.say(cached.keeps < recurrent.keeps
      ? `Token ${t.value}: the cache, ${number(cached.keeps)} numbers, is still smaller than the state, ${number(recurrent.keeps)}.`
      : cached.operations <= recurrent.operations
        ? `Token ${t.value}: the cache is larger than the state, but its step not dearer yet.`
        : `Token ${t.value}: the cache is larger and dearer to read. The state has not grown.`);
  });
});
