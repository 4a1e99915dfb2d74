// Pairs written into a state one by one: which of them are still found, by a sum, by the delta rule,
// and in a cache that keeps them all.

"use strict";

// --- Pairs by lot, the same in the chapter's cell ---------------------------------------------------

// Normal numbers from Park and Miller's generator and the formula of Box and Muller.
const lot = seed => {
  const uniform = () => { seed = 48271 * seed % 2147483647; return seed / 2147483647; };
  return () => {
    const [a, b] = [uniform(), uniform()];
    return Math.sqrt(-2 * Math.log(a)) * Math.cos(2 * Math.PI * b);
  };
};
const unit = x => x.map(entry => entry / Math.hypot(...x));
const unitVectors = (draw, N, D) => Array.from({length: N}, () => unit(Array.from({length: D}, draw)));

// Each D vectors that follow one another are at right angles: what they share with those before is
// taken away, as Gram and Schmidt do.
const atRightAngles = (vectors, D) => vectors.reduce((all, x) => {
  const before = all.slice(all.length - all.length % D);
  return [...all, unit(before.reduce((rest, y) => addVectors(rest, y.map(entry => -dot(x, y) * entry)), x))];
}, []);

// --- Three memories ---------------------------------------------------------------------------------

const state = {
  empty: D => zeros(D, D),
  read: (S, q) => vectorTimesMatrix(q, S),  // Sᵀ q
};
const memories = {
  sum: {...state, write: (S, k, v) => addMatrices(S, outer(k, v))},
  delta: {
    ...state,
    write: (S, k, v) => {
      const stored = state.read(S, k);
      return addMatrices(S, outer(k, v.map((entry, m) => entry - stored[m])));
    },
  },
  cache: {  // softmax over all keys, with a scale of 16
    empty: () => [],
    write: (pairs, k, v) => [...pairs, {k, v}],
    read: (pairs, q) => {
      const weights = pairs.map(({k}) => Math.exp(16 * (dot(q, k) - 1))), total = sum(weights);
      return pairs.reduce((read, {v}, j) => addVectors(read, v.map(entry => weights[j] / total * entry)), q.map(() => 0));
    },
  },
};

// For n = 0 ... N pairs written, whether each of them is found: whether what its key reads is nearest
// to its own value, among the values of all N pairs. They have length 1, so the largest product is.
const found = ({empty, write, read}, K, V) => {
  let memory = empty(K[0].length);
  const answer = k => { const o = read(memory, k), scores = V.map(v => dot(o, v)); return scores.indexOf(Math.max(...scores)); };
  return [[], ...K.map((k, n) => {
    memory = write(memory, k, V[n]);
    return K.slice(0, n + 1).map((k, j) => answer(k) === j);
  })];
};

// --- The page ---------------------------------------------------------------------------------------

explorable("fig-recall-overflow", "Write pair after pair: which are still found?", ui => {
  const N = 32, TITLES = {sum: "plain sum", delta: "delta rule", cache: "cache"}, names = Object.keys(TITLES);
  const COLORS = {sum: "blue", delta: "green", cache: "pink"};
  let seed = 1;

  const steps = ui.row("explorable-stays").steps("n", {label: "pairs written", count: N, value: 4, every: 700});
  const panelBox = ui.row("explorable-panels");
  const panels = Object.fromEntries(names.map(name => {
    const inner = panelBox.group(TITLES[name]);
    return [name, {inner, big: inner.big(`found-${name}`), picture: inner.row()}];
  }));
  ui.sentence();
  const curves = ui.row();
  ui.text("Each square is a pair. A full one is found: its key reads something that is nearer to its own value than to the 31 others. A crossed one is not.");
  const knobs = ui.row();
  const rows = knobs.choice("D", {label: "rows of the state", value: "8", options: {4: "4", 8: "8", 16: "16"}});
  const kind = knobs.choice("keys", {label: "keys", value: "lot", options: {lot: "by lot", right: "at right angles"}});
  knobs.button("again", "draw others", () => { seed += 1; });
  ui.startAgain(() => { seed = 1; });

  const known = {};
  const all = () => {
    const D = Number(rows.value);
    return known[`${D} ${kind.value} ${seed}`] ??= (() => {
      const draw = lot(seed), drawn = unitVectors(draw, N, D), V = unitVectors(draw, N, D);
      const K = kind.value === "right" ? atRightAngles(drawn, D) : drawn;
      return Object.fromEntries(names.map(name => [name, found(memories[name], K, V)]));
    })();
  };
  const count = (name, n) => sum(all()[name][n].map(Number));

  // --- A panel for each memory: a square for each pair ---

  const COLUMNS = 8, LINES = N / COLUMNS;
  const side = width => Math.min(25, Math.floor(width / COLUMNS));
  for (const name of names) panels[name].picture.drawing(`pairs-${name}`, {
    height: width => LINES * side(width),
    paint: width => {
      const n = steps.value, cell = side(width), right = all()[name][n];
      const shapes = Array.from({length: N}, (_, j) => {
        const x = 1.5 + j % COLUMNS * cell, y = 1.5 + Math.floor(j / COLUMNS) * cell, size = cell - 3;
        const box = {x, y, width: size, height: size, "data-name": `${name}-${j + 1}`};
        if (j >= n) return [["rect", {...box, class: "axis dotted later"}]];
        if (right[j]) return [["rect", {...box, class: `lit right ${COLORS[name]}`}]];
        return [
          ["rect", {...box, class: "wrong axis"}],
          ["path", {class: "line vermilion", d: `M ${x + 3} ${y + 3} l ${size - 6} ${size - 6} m 0 ${6 - size} l ${6 - size} ${size - 6}`}],
        ];
      }).flat();
      const lost = right.flatMap((ok, j) => (ok ? [] : [j + 1]));
      return {shapes, label: `${TITLES[name]}: ${right.length - lost.length} of ${several(n, "pair")} found; ${lost.length ? `not found: ${lost.join(", ")}` : "none is lost"}.`};
    },
  });

  // --- Right answers against the number of pairs ---

  curves.drawing("curves", {height: 190, paint: width => {
    const n = steps.value, D = Number(rows.value), left = 30, right = width - 84, top = 12, bottom = 152;
    const across = x => left + (right - left) * x / N, up = y => bottom - (bottom - top) * y / N;
    const ends = names.map(name => ({name, y: up(count(name, n))})).sort((a, b) => a.y - b.y);
    ends.forEach((end, i) => { if (i) end.y = Math.max(end.y, ends[i - 1].y + 15); });
    const over = Math.max(0, ends.at(-1).y - bottom);
    const shapes = [
      ["path", {class: "axis", d: `M ${left} ${top} V ${bottom} H ${right}`}],
      ["path", {class: "axis dotted", d: `M ${across(D)} ${top} V ${bottom}`}],
      ["text", {x: across(D), y: bottom + 16, class: "middle quiet small"}, String(D)],
      ["text", {x: right, y: bottom + 16, class: "middle quiet small"}, String(N)],
      ["text", {x: right, y: bottom + 33, class: "end quiet small"}, "pairs written"],
      ["text", {x: left - 6, y: top + 5, class: "end quiet small"}, String(N)],
      ["text", {x: left + 6, y: top + 5, class: "halo quiet small"}, "found"],
      ...names.map(name => ["path", {class: `line ${COLORS[name]}`, d: `M ${Array.from({length: n + 1}, (_, i) => `${across(i)} ${up(count(name, i))}`).join(" L ")}`}]),
      ...names.map(name => ["circle", {cx: across(n), cy: up(count(name, n)), r: 4, class: COLORS[name], "data-name": `point-${name}`}]),
      ...ends.map(({name, y}) => ["text", {x: across(n) + 9, y: y - over + 4, class: `halo small bold ${COLORS[name]}`}, TITLES[name]]),
    ];
    return {shapes, label: `Pairs found against pairs written, up to ${n}: ${names.map(name => `${TITLES[name]} ${count(name, n)}`).join(", ")}. A dotted line at ${D}, the rows of the state.`};
  }});

  const turned = (name, n) => all()[name][n - 1].flatMap((ok, j) => (ok && !all()[name][n][j] ? [j + 1] : []));
  const listedPairs = pairs => `pair${pairs.length > 1 ? "s" : ""} ${pairs.length > 1 ? `${pairs.slice(0, -1).join(", ")} and ${pairs.at(-1)}` : pairs[0]}`;
  const story = n => {
    const D = Number(rows.value);
    if (!n) return "Nothing is written. Both states are zero, and the cache is empty.";
    const lost = ["sum", "delta"].map(name => [name, turned(name, n)]).filter(([, pairs]) => pairs.length)
      .map(([name, pairs]) => `${name === "sum" ? "the sum" : "the delta rule"} ${listedPairs(pairs)}`);
    const full = n === D ? ` As many pairs as rows.` : n === D + 1 ? " From here on there are more pairs than rows." : "";
    return `Pair ${n} is written. ` + (lost.length ? `It costs ${lost.join(", and ")}.` : "No pair is lost by it.") + full;
  };

  ui.redraw(() => {
    const n = steps.value, D = Number(rows.value);
    for (const name of names) {
      const kept = name === "cache" ? 2 * D * n : D * D;
      panels[name].big.show(`${count(name, n)} of ${n}`, `found; ${several(kept, "number").replace(String(kept), number(kept))} kept`);
    }
    ui.say(story(n));
  });
});
