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
  const grids = ui.row();
  const cellWords = ui.text("");
  const L = ui.row().slider("L", {label: "chunk size L", min: 1, max: N, value: 2});
  const form = ui.choice("form", {
    label: "In words", options: Object.fromEntries(Object.keys(FORMS).map(name => [name, name])), value: "chunkwise",
  });
  ui.sentence();
  const costs = ui.fold("Operations and stored numbers").matrix("costs", {
    label: "For C = M = 1",
    rows: Object.keys(FORMS), columns: ["work so far", "work", "memory", "depth"],
  });
  const table = ui.fold("States and outputs, and other numbers to type").row("explorable-scroll explorable-columns");
  const typed = table.numbers("tokens", {
    label: "q, k and v of the eight tokens", rows: ["q", "k", "v"], min: -9, max: 9, digits: 1,
    values: [[1, 2, 1, 1, 2, 1, 1, 2], [1, 1, 2, 1, 1, 2, 1, 1], [3, 1, 2, 5, 4, 1, 2, 6]],
  });
  const numbers = table.matrix("numbers", {label: "kept after this step, and the outputs so far", rows: ["S", "z", "o"]});
  ui.startAgain();
  const steps = name => FORMS[name].run(...typed.value, L.value);

  // --- The triangles ---

  const GAP = 14, HEAD = 20, FOOT = 58;
  const across = width => (width < 500 ? 2 : 4);
  const cell = width => Math.min(22, Math.floor((width - GAP * (across(width) - 1)) / across(width) / N));
  const panelHeight = width => HEAD + N * cell(width) + FOOT;
  let pointed = null, drawn = time.value, fresh = false;  // the cell [t, i] that is pointed at; a step was made
  const panel = (name, x, y, width) => {
    const size = cell(width), all = steps(name), done = Math.min(time.value, all.length);
    const square = ([t, i], kind) =>
      ["rect", {x: x + i * size, y: y + HEAD + t * size, width: size - 1, height: size - 1, class: kind}];
    const kind = ([t, i], color, step) =>
      `lit ${i > t ? "gray" : color} ${step < time.value - 1 ? "pale" : `${i > t ? "pale" : ""} ${fresh ? "fresh" : ""}`}`;
    return [
      ["text", {x, y: y + 13, class: "bold"}, name],
      ...upTo(N).flatMap(t => upTo(t + 1).map(i => square([t, i], "axis cell"))),
      ...all.slice(0, done).flatMap((step, index) => [
        ...step.weights.map(place => square(place, kind(place, "vermilion", index))),
        ...step.covered.map(place => square(place, kind(place, "blue", index))),
      ]),
      pointed && ["rect", {
        x: x + pointed[1] * size - 1, y: y + HEAD + pointed[0] * size - 1, width: size + 1, height: size + 1, class: "frame"}],
      ...[
        `${done} of ${several(all.length, "step")}`,
        `work ${sum(all.slice(0, done).map(step => step.work))} of ${sum(all.map(step => step.work))}`,
        `keeps ${FORMS[name].memory(L.value)}`,
      ].map((words, line) => ["text", {x, y: y + HEAD + N * size + 16 + 17 * line, class: "quiet small"}, words]),
    ];
  };
  const places = width => Object.keys(FORMS).map((name, place) => ({
    name, x: place % across(width) * (width + GAP) / across(width), y: Math.floor(place / across(width)) * panelHeight(width),
  }));
  ui.redraw(() => { [fresh, drawn] = [time.value === drawn + 1, time.value]; });
  const drawing = grids.drawing("orders", {
    height: width => (4 / across(width)) * panelHeight(width),
    paint: width => ({
      label: `Triangles of ${N} by ${N} cells, row t for the output t, column i for what token i adds to it. `
        + Object.keys(FORMS).map(name => {
          const all = steps(name);
          return `${name}: ${Math.min(time.value, all.length)} of ${several(all.length, "step")} done`;
        }).join(", ") + ".",
      shapes: places(width).flatMap(({name, x, y}) => panel(name, x, y, width)),
    }),
  });

  // A cell that is pointed at is named, and framed in all four triangles.
  const point = event => {
    const box = drawing.svg.getBoundingClientRect(), size = cell(box.width), was = String(pointed);
    if (event.type === "pointerleave" && event.pointerType === "touch") return;  // a finger that was lifted
    pointed = null;
    for (const {x, y} of places(box.width)) {
      const t = Math.floor((event.clientY - box.top - y - HEAD) / size), i = Math.floor((event.clientX - box.left - x) / size);
      if (event.type !== "pointerleave" && Math.min(t, i) >= 0 && Math.max(t, i) < N) pointed = [t, i];
    }
    if (String(pointed) !== was) ui.change();
  };
  for (const type of ["pointermove", "pointerdown", "pointerleave"]) drawing.svg.addEventListener(type, point);
  const nameCell = ([t, i]) => {
    const q = subscript(t + 1), k = subscript(i + 1), [queries, keys] = typed.value;
    const product = `q${q} · k${k} = ${brief(queries[t] * keys[i])}`;
    if (i > t) return `${product} is no part of output ${t + 1}: token ${i + 1} comes later.`;
    const here = ([a, b]) => a === t && b === i;
    const when = Object.keys(FORMS).map(name => {
      const all = steps(name), step = all.findIndex(({weights, covered}) => [...weights, ...covered].some(here));
      return `${name} in step ${step + 1}${all[step].covered.some(here) ? ", through a state" : ""}`;
    });
    return `${product}, the weight of v${k} in o${q}: ${when.join("; ")}.`;
  };

  ui.redraw(() => {
    const s = time.value;
    cellWords.show(pointed ? nameCell(pointed)
      : "Row t is output t, column i what token i adds. Vermilion: multiplied out. Blue: through a state. Point at a cell.");
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
