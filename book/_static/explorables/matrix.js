// Two ways to bracket QKᵀV, drawn to scale: how much less one computes than the other.

"use strict";

explorable("fig-two-brackets", "Slide N and D: both orders are drawn to one scale", ui => {
  const powers = (from, to) => Array.from({length: to - from + 1}, (_, i) => 2 ** (from + i));
  const knobs = ui.row("explorable-stays");
  const N = knobs.slider("N", {label: "tokens N", values: powers(3, 20), value: 512, show: number});
  const D = knobs.slider("D", {label: "width D = M", values: powers(2, 8), value: 64});

  // The counts of lesson_code.costs, for M = D and with the normalizer of linear attention.
  const quadratic = {operations: n => 2 * n * n * D.value, entries: n => n * n + n * D.value};
  const linear = {
    operations: n => 2 * n * D.value * (D.value + 1),
    entries: n => 2 * n * D.value + D.value * D.value,
  };
  const crossing = () => D.value + 2;  // the first N above 2 D (D + 1) / (D + D)

  // --- Both products, to scale ---

  // Of the longest rectangle. On a phone both products stand on one screen with the sliders.
  const side = width => Math.min(0.42 * width, innerWidth > 600 ? 140 : 100);
  const gap = 44, above = 24, below = 24;
  const short = n => (n < 1e4 ? number(n) : n < 1e6 ? `${Math.round(n / 1024)}K` : "1M");  // 65,536 is 64K
  // Two factors of (rows, columns) = (down, across), each in the middle of its own place.
  const product = (factors, words) => width => {
    const scale = side(width) / Math.max(N.value, D.value), middle = above + side(width) / 2;
    const shapes = [["text", {x: side(width) + gap / 2, y: middle + 5, class: "middle"}, "×"]];
    factors.forEach(({name, down, across, color}, place) => {
      const x = side(width) / 2 + place * (side(width) + gap);
      const exact = [across.value * scale, down.value * scale];
      const [wide, tall] = exact.map(pixels => Math.max(1, pixels));  // a line, where it is thinner
      shapes.push(
        ["rect", {x: x - wide / 2, y: middle - tall / 2, width: wide, height: tall, class: `pale ${color}`}],
        ["text", {x, y: middle - tall / 2 - 7, class: "middle bold"}, name],
        ["text", {x, y: middle + tall / 2 + 16, class: "middle quiet small"},
          `${short(down.value)} × ${short(across.value)}`]);
      if (Math.max(...exact) < 1) shapes.push(
        ["circle", {cx: x, cy: middle, r: 5, class: `line ${color}`, "stroke-opacity": 0.5}],
        ["text", {x: Math.min(x + 60, width), y: middle + 36, class: "end quiet"}, `to scale: ${exact[0].toPrecision(1)} px`]);
    });
    return {label: words(), shapes};
  };
  const both = ui.row("explorable-sides");
  const height = width => above + side(width) + below;
  both.group("(Q Kᵀ) V: through the matrix").drawing("quadratic", {height, paint: product([
    {name: "QKᵀ", down: N, across: N, color: "vermilion"},
    {name: "V", down: N, across: D, color: "gray"},
  ], () => `The matrix, ${number(N.value)} by ${number(N.value)}, times the values, ${number(N.value)} by ${D.value}, to scale.`)});
  const ratio = both.big("ratio");
  both.group("Q (Kᵀ V): through the state").drawing("linear", {height, paint: product([
    {name: "Q", down: N, across: D, color: "gray"},
    {name: "S = KᵀV", down: D, across: D, color: "blue"},
  ], () => `The queries, ${number(N.value)} by ${D.value}, times the state, ${D.value} by ${D.value}, to the same scale.`)});
  ui.sentence();

  // --- Operations against N, both axes logarithmic ---

  ui.drawing("crossing", {height: 204, paint: width => {
    const left = 46, right = width - 12, top = 14, bottom = 160;
    const first = 8, last = 2 ** 20;
    const high = Math.log10(2 * last ** 2 * 256), low = Math.log10(2 * first * 4 * 5);
    const across = n => left + (right - left) * Math.log2(n / first) / Math.log2(last / first);
    const tokens = x => first * (last / first) ** ((x - left) / (right - left));  // back from across
    const up = operations => bottom - (bottom - top) * (Math.log10(operations) - low) / (high - low);
    const line = (way, color, dash) => ["path", {
      class: `line ${color} ${dash}`,
      d: `M ${across(first)} ${up(way.operations(first))} L ${across(last)} ${up(way.operations(last))}`,
    }];
    const ticks = [1, 2, 3, 4, 5, 6].flatMap(power => [
      ["path", {class: "axis", d: `M ${across(10 ** power)} ${bottom} v 4`}],
      ["text", {x: across(10 ** power), y: bottom + 18, class: "middle quiet"}, powerOfTen(power)],
    ]);
    const powersOfTen = [4, 7, 10, 13].flatMap(power => [
      ["path", {class: "axis", d: `M ${left} ${up(10 ** power)} H ${right}`, "stroke-dasharray": "2 4"}],
      ["text", {x: left - 6, y: up(10 ** power) + 4, class: "end quiet"}, powerOfTen(power)],
    ]);
    const named = last / 16;  // to the left of here stands the name of the upper line
    const meet = crossing() - 1;  // here both need the same number of operations
    const equal = {x: across(meet) + 8, y: up(linear.operations(meet)) + 14};
    const under = up(linear.operations(tokens(right - 110))) + 18;  // the name of the lower line
    const crowded = equal.x > right - 210 && Math.abs(under - equal.y) < 16;
    const shapes = [
      ["path", {class: "axis", d: `M ${left} ${top} V ${bottom} H ${right}`}], ...ticks, ...powersOfTen,
      ["path", {class: "axis", d: `M ${across(N.value)} ${top} V ${bottom}`}],
      ["text", {x: right, y: bottom + 37, class: "end quiet"}, "tokens N"],
      ["text", {x: left + 6, y: top + 4, class: "halo quiet"}, "operations"],
      line(quadratic, "vermilion", ""), line(linear, "blue", "dashed"),
      ["text", {x: across(named), y: up(quadratic.operations(named)) - 8, class: "end halo vermilion"}, "through the matrix"],
      ["text", {x: right, y: crowded ? equal.y + 16 : under, class: "end halo blue"}, "through the state"],
      ...(meet < first ? [] : [
        ["circle", {cx: across(meet), cy: up(linear.operations(meet)), r: 4, class: "gray"}],
        ["text", {...equal, class: "halo quiet"}, `equal at N = ${meet}`],
      ]),
      ["circle", {cx: across(N.value), cy: up(quadratic.operations(N.value)), r: 5, class: "vermilion"}],
      ["circle", {cx: across(N.value), cy: up(linear.operations(N.value)), r: 5, class: "blue"}],
    ];
    return {shapes, label: `Operations against the number of tokens, both axes logarithmic. The lines meet at N = ${meet}.`};
  }});

  const more = ui.fold("The counts"), columns = more.row();
  const counts = Object.fromEntries(Object.entries({quadratic: ["matrix", "QKᵀ"], linear: ["state", "S"]}).map(
    ([way, [name, middle]]) => {
      const side = columns.group(`Through the ${name}`);
      return [way, {
        middle: side.readout(`${way}-middle`, `numbers in ${middle}`),
        operations: side.readout(`${way}-operations`, "operations"),
        bytes: side.readout(`${way}-bytes`, "bytes kept (float32)"),
      }];
    }));
  const cheaper = more.readout("crossover", "first N at which the state needs fewer operations");
  ui.startAgain();

  ui.redraw(() => {
    const n = N.value, d = D.value;
    counts.quadratic.middle.show(n * n);
    counts.linear.middle.show(d * d);
    for (const [way, count] of Object.entries({quadratic, linear})) {
      counts[way].operations.show(count.operations(n));
      counts[way].bytes.show(4 * count.entries(n));
    }
    cheaper.show(crossing());
    const times = quadratic.operations(n) / linear.operations(n), larger = Math.max(times, 1 / times);
    const shown = larger < 10 ? number(larger, 1) : number(larger), way = times > 1 ? "state" : "matrix";
    ratio.show(`${shown}×`, times === 1 ? "as many operations" : `fewer operations through the ${way}`);
    ui.say(`QKᵀ holds ${number(n * n)} numbers, S holds ${number(d * d)}. `
      + (times === 1 ? "Both ways take the same number of operations."
        : `Through the ${way} it takes ${shown} times fewer operations.`));
  });
});
