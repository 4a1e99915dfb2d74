// One output, two ways: a row of the masked matrix weighs the values, or a query reads the state.

"use strict";

explorable("fig-two-ways", "Choose t, and type queries, keys and values: both ways meet in every term", ui => {
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

  const inputs = ui.row("explorable-tight"), rows = tokens.map(j => String(j + 1));
  const queries = inputs.numbers("queries", {label: "rows of Q", rows, values: start.queries, min: -9, max: 9});
  const keys = inputs.numbers("keys", {label: "K", rows, heads: false, values: start.keys, min: -9, max: 9});
  const values = inputs.numbers("values", {label: "V", rows, heads: false, values: start.values});
  const scores = inputs.matrix("scores", {label: "A = QKᵀ ⊙ m"});
  const steps = ui.steps("t", {label: "output at t", first: 1, count: N, value: N});

  // --- The drawing: a column for each token and one for the sum, a band for each step ---

  // As many digits after the point, up to two, as there is room for in a cell.
  const fit = x => [2, 1, 0].map(digits => brief(x, digits)).find(text => text.length <= 6) ?? scientific(x, 1);
  const fitted = vector => listed(vector, fit);

  const bands = t => {
    const {K, V, S, z, written, terms, weights, output, divisor} = compute(t), row = vector => [vector];
    return [
      {name: "weights", color: "vermilion", label: `attention: row ${t} of A`, each: j => [[weights[j]]],
        all: [[divisor.attention]]},
      {name: "values", color: "vermilion", label: "times the values vⱼ", each: j => row(V[j])},
      {name: "attention", color: "green", label: "= the terms", each: j => row(terms.attention[j]),
        all: row(output.attention)},
      {name: "memory", color: "green", label: "= the same terms", each: j => row(terms.memory[j]),
        all: row(output.memory)},
      {name: "written", color: "blue", label: `memory: q${subscript(t)} reads kⱼ vⱼᵀ`, each: j => written[j], all: S},
      {name: "keys", color: "blue", label: "the keys kⱼ", each: j => row(K[j]), all: row(z)},
    ];
  };
  const sums = t => ({
    weights: "row sum", attention: `row ${t} of AV`, memory: `q${subscript(t)}ᵀ S${subscript(t)}`,
    written: `S${subscript(t)}`, keys: `z${subscript(t)}`,
  });
  const cellHeight = 24, gap = 22;
  const tall = () => 26 + 6 * gap + 7 * cellHeight + 10;
  const paint = width => {
    const t = steps.value, shapes = [];
    const left = width > 540 ? 160 : 0, column = (width - left) / (N + 1), cell = Math.min(46, (column - 4) / 2);
    const center = j => left + (j + 0.5) * column;
    const block = (matrix, middle, y, color, name) => {
      const wide = matrix[0].length * cell;
      matrix.forEach((row, i) => row.forEach((x, m) => {
        const at = {x: middle - wide / 2 + m * cell, y: y + i * cellHeight}, text = fit(x);
        const squeezed = text.length * 7.7 > cell - 2 ? {textLength: cell - 4, lengthAdjust: "spacingAndGlyphs"} : {};
        shapes.push(
          ["rect", {...at, width: cell, height: cellHeight, class: `pale ${color}`}],
          ["text", {
            x: at.x + cell / 2, y: at.y + 16, class: "middle small", "data-name": `${name}-${i}-${m}`, ...squeezed}, text]);
      }));
    };
    for (const j of tokens)
      shapes.push(["text", {x: center(j), y: 14, class: `middle ${j < t ? "bold" : "quiet"}`}, `token ${j + 1}`]);
    shapes.push(["text", {x: center(N), y: 14, class: "middle bold"}, "sum"]);
    let y = 20;
    for (const {name, color, label, each, all} of bands(t)) {
      y += gap;
      const height = (name === "written" ? 2 : 1) * cellHeight;
      shapes.push(["text", left ? {x: 0, y: y + height / 2 + 5, class: "quiet"} : {x: 2, y: y - 5, class: "quiet small"}, label]);
      for (const j of tokens)
        if (j < t) block(each(j), center(j), y, color, `${name}-${j + 1}`);
        else shapes.push(["rect", {x: center(j) - cell, y, width: 2 * cell, height, class: "gray pale", "stroke-width": 0}]);
      if (all) {
        block(all, center(N), y, color, `${name}-sum`);
        shapes.push(["text", {x: Math.min(center(N), width - 40), y: y - 5, class: "middle quiet small"}, sums(t)[name]]);
      }
      y += height;
    }
    const {output} = compute(t);
    return {shapes, label: `The terms of output ${t}, for each token twice. Row ${t} of the matrix times the values ` +
      `sums to ${fitted(output.attention)}, the query reads ${fitted(output.memory)} from the state.`};
  };
  ui.drawing("terms", {height: tall, paint});
  ui.sentence();
  const ends = ui.row();
  const end = (way, heading, divisor) => {
    const side = ends.group(heading);
    return {
      divisor: side.readout(`${way}-divisor`, divisor),
      normalized: side.readout(`${way}-normalized`, "divided by it"),
    };
  };
  const both = {
    attention: end("attention", "Attention, normalized", "sum of row t of A"),
    memory: end("memory", "Memory, normalized", "qₜ · zₜ"),
  };
  ui.startAgain();

  const remark = ({output, divisor, weights}) => {
    if (divisor.memory === 0 && divisor.attention === 0)
      return "The weights sum to 0: there is nothing to divide by, and the normalized output is set to 0.";
    if (Math.abs(divisor.memory) < 1e-9 * sum(weights.map(Math.abs)))
      return "The weights sum to 0 but for rounding errors: the normalized output means nothing.";
    if (Math.min(...weights) < 0)
      return "Some weights are negative, so the normalized output is no mean of the values.";
    return `Divided by the sum of the weights, ${fitted(divide(output.memory, divisor.memory))} is a weighted mean of the values so far.`;
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
    ui.say(`${fitted(output.attention)} by row ${t} of the matrix, ${fitted(output.memory)} by the state ` +
      `S${subscript(t)}. ${remark(found)}`);
  });
});
