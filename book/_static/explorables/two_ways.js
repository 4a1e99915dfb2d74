// One output, two ways: a row of the masked matrix weighs the values, or a query reads the state.

"use strict";

explorable("fig-two-ways", "Step through t: both ways meet in every term", ui => {
  const start = {
    queries: [[1, 0], [0, 1], [1, 1]], keys: [[1, 0], [0, 1], [1, 1]], values: [[10, 20], [30, 40], [50, 60]],
  };
  const N = start.keys.length, tokens = [...start.keys.keys()];  // 0 ... N − 1

  // --- Attention: all positions at once, through a matrix ---

  const maskedMatrix = (Q, K) => Q.map((q, t) => K.map((k, j) => (j <= t ? dot(q, k) : 0)));  // A = QKᵀ ⊙ m
  const weigh = (weight, v) => v.map(x => weight * x);  // A_tj v_j

  // --- Memory: one token after the other, through a state ---

  const write = ({S, z}, k, v) => ({S: addMatrices(S, outer(k, v)), z: addVectors(z, k)});
  const read = (S, q) => vectorTimesMatrix(q, S);  // qᵀ S
  const statesAfter = (K, V) => tokens.reduce(
    (all, t) => [...all, write(all.at(-1), K[t], V[t])], [{S: zeros(2, 2), z: [0, 0]}]);  // S_0 ... S_N

  // --- What both have in common: a sum over tokens, and the division ---

  const total = vectors => vectors.reduce(addVectors);
  const divide = (o, divisor) => o.map(x => (divisor === 0 ? 0 : x / divisor));  // 0 where it is 0

  const compute = t => {
    const [Q, K, V] = [queries.value, keys.value, values.value], q = Q[t - 1];
    const A = maskedMatrix(Q, K), {S, z} = statesAfter(K, V)[t], past = tokens.slice(0, t);
    const written = past.map(j => outer(K[j], V[j]));
    const terms = {
      attention: past.map(j => weigh(A[t - 1][j], V[j])),
      memory: written.map(one => read(one, q)),
    };
    return {
      q, K, V, A, S, z, written, terms, weights: A[t - 1].slice(0, t),
      output: {attention: total(terms.attention), memory: read(S, q)},
      divisor: {attention: sum(A[t - 1]), memory: dot(q, z)},
    };
  };

  // --- What one can change ---

  const steps = ui.row("explorable-stays").steps("t", {
    label: "output at t", first: 1, count: N, every: 2000,
    forward: t => {
      const part = name => drawing.svg.querySelector(`[data-name="${name}"]`);
      ui.fly(part(`written-${t}`), part("written-sum"), "blue");
    },
  });
  const picture = ui.row();
  ui.sentence();
  const more = ui.fold("Type other numbers"), inputs = more.row("explorable-tight");
  const rows = tokens.map(j => String(j + 1));
  const queries = inputs.numbers("queries", {label: "rows of Q", rows, values: start.queries, min: -9, max: 9});
  const keys = inputs.numbers("keys", {label: "K", rows, heads: false, values: start.keys, min: -9, max: 9});
  const values = inputs.numbers("values", {label: "V", rows, heads: false, values: start.values});
  const scores = inputs.matrix("scores", {label: "A = QKᵀ ⊙ m"});

  // --- The drawing: a column for each token, one before them for the query, and one for the sum.
  // Attention is read from the top downwards, memory from the bottom upwards: they meet in the terms. ---

  const fitted = vector => listed(vector, fit);
  const bands = t => {
    const {q, V, S, written, terms, weights, output, divisor} = compute(t), at = subscript(t);
    return [
      {name: "weights", color: "vermilion", label: `q${at} · kⱼ: row ${t} of A`, query: true,
        each: j => [[weights[j]]], all: [[divisor.attention]], sum: "row sum"},
      {name: "values", color: "vermilion", label: "times vⱼ", each: j => [V[j]]},
      {name: "attention", color: "green", label: "= the terms", each: j => [terms.attention[j]],
        all: [output.attention], sum: `row ${t} of AV`},
      {name: "memory", color: "green", label: "= the same terms", each: j => [terms.memory[j]],
        all: [output.memory], sum: `q${at}ᵀ S${at}`},
      {name: "written", color: "blue", label: `q${at} reads each kⱼ vⱼᵀ`, query: true,
        each: j => written[j], all: S, sum: `S${at}`},
    ].map(band => ({...band, q: band.query && [q], rows: band.name === "written" ? 2 : 1}));
  };
  const height = 24, gap = 24, head = 24, middle = 10;  // pixels; between both halves is more room
  const tall = head + 5 * gap + 6 * height + middle + 24;
  const paint = width => {
    const t = steps.value, shapes = [], left = 18, column = (width - left) / (N + 2), cell = Math.min(46, (column - 4) / 2);
    const center = j => left + (j + 1.5) * column;
    const block = (matrix, at, y, color, name) => shapes.push(
      ...cells(matrix, {x: at - matrix[0].length * cell / 2, y, cell, height, color, text: fit, name}));
    // Down the left side the way that attention goes, and up it the way of memory.
    const way = (from, to, color, words, y) => shapes.push(
      ["path", {class: `line ${color}`, d: `M 6 ${from} V ${to} m -4 ${from < to ? -6 : 6} l 4 ${from < to ? 6 : -6} l 4 ${from < to ? -6 : 6}`}],
      ["text", {x: 0, y, class: `bold ${color}`}, words]);
    for (const j of tokens)
      shapes.push(["text", {x: center(j), y: 14, class: `middle ${j < t ? "bold" : "quiet"}`}, width > 500 ? `token ${j + 1}` : j + 1]);
    shapes.push(["text", {x: center(N), y: 14, class: "middle bold"}, "sum"]);
    let y = head, meet;
    for (const {name, color, label, q, each, all, sum, rows} of bands(t)) {
      if (name === "memory") [meet, y] = [y + middle / 2, y + middle];
      y += gap;
      shapes.push(["text", {x: left, y: y - 6, class: "quiet small"}, label]);
      if (q) block(q, center(-1), y + (rows - 1) * height / 2, "pink", `${name}-query`);
      for (const j of tokens)
        if (j < t) block(each(j), center(j), y, color, `${name}-${j + 1}`);
        else shapes.push(["rect", {x: center(j) - cell, y, width: 2 * cell, height: rows * height, class: "gray pale lit"}]);
      if (all) {
        block(all, center(N), y, color, `${name}-sum`);
        shapes.push(["text", {x: Math.min(center(N), width - 36), y: y - 6, class: "middle quiet small"}, sum]);
      }
      y += rows * height;
    }
    way(head, meet - 2, "vermilion", "attention", 14);
    way(y + 4, meet + 6, "blue", "memory", y + 18);
    const {output} = compute(t);
    return {shapes, label: `The terms of output ${t}, for each token twice. From the top: row ${t} of the matrix times the values `
      + `sums to ${fitted(output.attention)}. From the bottom: the query reads ${fitted(output.memory)} from the state.`};
  };
  const drawing = picture.drawing("terms", {height: tall, paint});

  const normalized = ui.fold("Divided by the sum of the weights"), ends = normalized.row();
  const end = (way, heading, divisor) => {
    const side = ends.group(heading);
    return {
      divisor: side.readout(`${way}-divisor`, divisor),
      normalized: side.readout(`${way}-normalized`, "divided by it"),
    };
  };
  const both = {
    attention: end("attention", "Attention", "sum of row t of A"),
    memory: end("memory", "Memory", "qₜ · zₜ"),
  };
  const remark = normalized.text("");
  ui.startAgain();

  const meaning = ({output, divisor, weights}) => {
    if (divisor.memory === 0 && divisor.attention === 0)
      return "The weights sum to 0: there is nothing to divide by, and the normalized output is set to 0.";
    if (Math.abs(divisor.memory) < 1e-9 * sum(weights.map(Math.abs)))
      return "The weights sum to 0 but for rounding errors: the normalized output means nothing.";
    if (Math.min(...weights) < 0)
      return "Some weights are negative, so the normalized output is no mean of the values.";
    return `${fitted(divide(output.memory, divisor.memory))} is a weighted mean of the values so far.`;
  };

  ui.redraw(() => {
    const t = steps.value, found = compute(t), {A, output, divisor} = found;
    scores.show(A, {
      text: (x, i, j) => (j <= i ? fit(x) : ""),
      mark: (i, j) => (j > i ? "off" : i === t - 1 ? "new" : ""),
    });
    for (const way of ["attention", "memory"]) {
      both[way].divisor.show(fit(divisor[way]));
      both[way].normalized.show(fitted(divide(output[way], divisor[way])));
    }
    remark.show(meaning(found));
    ui.say(`Row ${t} of the matrix weighs ${several(t, "value")}: ${fitted(output.attention)}. `
      + `The query reads ${fitted(output.memory)} from one state, S${subscript(t)}.`);
  });
});
