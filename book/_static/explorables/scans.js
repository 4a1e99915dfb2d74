// Four orders in which the same triangle of a causal sum is computed: what is done in each step,
// what is kept, and how much work it is. Eight tokens of width C = M = 1, so that a state is two
// numbers, S and z.

"use strict";

explorable("fig-four-orders", "Step: the same triangle, filled in four orders", ui => {
  const N = 8, C = 1, M = 1;
  const STATE = C * (M + 1);  // numbers in S and z

  // --- The four forms: a list of steps each ---
  //
  // A step says what it computes. `weights` are the products q_t k_i that it forms, `covered` those
  // that a state stands for, as pairs [t, i] that count from 0; `S` and `z` are what is kept
  // afterwards, by the last token that is in it; `o` are the outputs, and `work` the operations.

  const upTo = n => Array.from({length: n}, (_, i) => i);
  const nothing = () => Array(N).fill(NaN);
  const put = (row, t, x) => row.map((other, i) => (i === t ? x : other));

  const masked = (q, k, v) => [{
    weights: upTo(N).flatMap(t => upTo(N).map(i => [t, i])), covered: [],
    S: nothing(), z: nothing(),
    o: q.map((q_t, t) => sum(upTo(t + 1).map(i => q_t * k[i] * v[i]))),
    work: N * N * (C + M),
    words: `All ${N * N} weights at once, and ${N * (N - 1) / 2} of them are masked.`,
  }];

  const recurrent = (q, k, v) => {
    let S = 0, z = 0, o = nothing();
    return upTo(N).map(t => {
      S += k[t] * v[t];
      z += k[t];
      o = put(o, t, q[t] * S);
      return {
        weights: [], covered: upTo(t + 1).map(i => [t, i]), S: put(nothing(), t, S), z: put(nothing(), t, z), o,
        work: 2 * STATE,  // each number of the state is written and read
        words: `Token ${t + 1} is added to the one state, and its query reads it.`,
      };
    });
  };

  const scan = (q, k, v) => {  // of Hillis and Steele
    let S = k.map((k_t, t) => k_t * v[t]), z = [...k];
    const steps = [];
    for (let distance = 1; distance < N; distance *= 2) {
      const add = x => x.map((x_t, t) => (t < distance ? x_t : x[t - distance] + x_t));
      [S, z] = [add(S), add(z)];
      const first = distance === 1, last = 2 * distance >= N, added = N - distance;
      steps.push({
        weights: [],
        covered: upTo(N).flatMap(t => upTo(t + 1).filter(i => {
          const apart = t - i;
          return apart < 2 * distance && (first || apart >= distance);
        }).map(i => [t, i])),
        S, z, o: last ? q.map((q_t, t) => q_t * S[t]) : nothing(),
        // N products first, and the additions of round 1 come with them; N reads last.
        work: STATE * ((first ? N : added) + (last ? N : 0)),
        words: `Each state adds the one ${distance === 1 ? "before it" : `${distance} places before it`}: ${added} at once.`,
      });
    }
    return steps;
  };

  const chunkwise = (q, k, v, L) => {
    let S = 0, z = 0, o = nothing();
    return upTo(Math.ceil(N / L)).map(chunk => {
      const start = chunk * L, end = Math.min(start + L, N);
      const inside = upTo(N).slice(start, end);
      for (const t of inside) {
        const own = sum(inside.filter(i => i <= t).map(i => q[t] * k[i] * v[i]));
        o = put(o, t, own + q[t] * S);
      }
      S += sum(inside.map(i => k[i] * v[i]));
      z += sum(inside.map(i => k[i]));
      const length = inside.length;
      return {
        weights: inside.flatMap(t => inside.map(i => [t, i])),
        covered: inside.flatMap(t => upTo(start).map(i => [t, i])),
        S: put(nothing(), end - 1, S), z: put(nothing(), end - 1, z), o,
        work: length * length * (C + M) + 2 * length * STATE,
        words: `Chunk ${chunk + 1}: ${several(length * length, "weight")} of its own`
          + (chunk ? `, one state for the ${several(start, "token")} before it.` : "."),
      };
    });
  };

  const FORMS = {
    masked: {run: masked, name: "The masked form", memory: () => N * N},
    recurrent: {run: recurrent, name: "The recurrence", memory: () => STATE},
    scan: {run: scan, name: "The scan", memory: () => N * STATE},
    chunkwise: {run: chunkwise, name: "The chunkwise form", memory: L => Math.min(L, N) ** 2 + STATE},
  };

  // --- What the reader sets ---

  const time = ui.row("explorable-stays").steps("step", {label: "steps done", count: N, value: 2});
  const knobs = ui.row();
  const L = knobs.slider("L", {label: "chunk size L", min: 1, max: N, value: 2});
  const grids = ui.row();
  const costs = ui.matrix("costs", {
    label: "Operations and stored numbers, for C = M = 1",
    rows: Object.keys(FORMS), columns: ["work so far", "work", "memory", "depth"],
  });
  const form = ui.choice("form", {
    label: "Numbers of", options: Object.fromEntries(Object.keys(FORMS).map(name => [name, name])), value: "chunkwise",
  });
  ui.sentence();
  const table = ui.row("explorable-scroll explorable-columns");
  const typed = table.numbers("tokens", {
    label: "q, k and v of the eight tokens", rows: ["q", "k", "v"], min: -9, max: 9, digits: 1,
    values: [[1, 2, 1, 1, 2, 1, 1, 2], [1, 1, 2, 1, 1, 2, 1, 1], [3, 1, 2, 5, 4, 1, 2, 6]],
  });
  const numbers = table.matrix("numbers", {label: "kept after this step, and the outputs so far", rows: ["S", "z", "o"]});
  ui.startAgain();
  const steps = name => FORMS[name].run(...typed.value, L.value);

  // --- The triangles ---

  const GAP = 14, HEAD = 20, FOOT = 22;
  const across = width => (width < 500 ? 2 : 4);
  const cell = width => Math.min(22, Math.floor((width - GAP * (across(width) - 1)) / across(width) / N));
  const panelHeight = width => HEAD + N * cell(width) + FOOT;
  const panel = (name, x, y, width) => {
    const size = cell(width), all = steps(name), done = Math.min(time.value, all.length);
    const square = ([t, i], kind) =>
      ["rect", {x: x + i * size, y: y + HEAD + t * size, width: size - 1, height: size - 1, class: kind}];
    const kind = ([t, i], color, step) =>
      `lit ${i > t ? "gray" : color} ${step === time.value - 1 && i <= t ? "" : "pale"}`;
    return [
      ["text", {x, y: y + 13, class: "bold"}, name],
      ...upTo(N).flatMap(t => upTo(t + 1).map(i => square([t, i], "axis cell"))),
      ...all.slice(0, done).flatMap((step, index) => [
        ...step.weights.map(place => square(place, kind(place, "vermilion", index))),
        ...step.covered.map(place => square(place, kind(place, "blue", index))),
      ]),
      ["text", {x, y: y + HEAD + N * size + 15, class: "quiet"}, `${done} of ${several(all.length, "step")}`],
    ];
  };
  grids.drawing("orders", {
    height: width => (4 / across(width)) * panelHeight(width),
    paint: width => ({
      label: `Triangles of ${N} by ${N} cells, row t for the output t, column i for what token i adds to it. `
        + Object.keys(FORMS).map(name => {
          const all = steps(name);
          return `${name}: ${Math.min(time.value, all.length)} of ${several(all.length, "step")} done`;
        }).join(", ") + ".",
      shapes: Object.keys(FORMS).flatMap((name, place) => {
        const column = place % across(width), row = Math.floor(place / across(width));
        const pitch = (width + GAP) / across(width);
        return panel(name, column * pitch, row * panelHeight(width), width);
      }),
    }),
  });

  ui.redraw(() => {
    const s = time.value;
    costs.show(Object.keys(FORMS).map(name => {
      const all = steps(name), work = sum(all.map(step => step.work));
      return [sum(all.slice(0, s).map(step => step.work)), work, FORMS[name].memory(L.value), all.length];
    }), {text: x => number(x), tint: false});

    const all = steps(form.value), now = all[Math.min(s, all.length) - 1];
    const {S, z, o} = now ?? {S: nothing(), z: nothing(), o: nothing()};
    numbers.show([S, z, o], {
      text: x => brief(x), tint: false,
      caption: form.value === "masked" ? "no state is kept; the outputs" : "kept after this step, and the outputs so far",
      mark: (i, t) => (Number.isNaN([S, z, o][i][t]) ? "" : i === 2 ? "read" : "kept"),
    });
    const special = form.value !== "chunkwise" ? "" : L.value === 1 ? " Chunks of one token are the recurrence."
      : L.value === N ? " One chunk is the masked form." : "";
    ui.say(s === 0 ? "Nothing is computed yet."
      : s > all.length ? `${FORMS[form.value].name} was done after ${several(all.length, "step")}.`
      : `Step ${s}. ${now.words}${special}`);
  });
});
