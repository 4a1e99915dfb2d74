// Ones, added one after the other in few digits: where the floats are too far apart, a sum sticks.

"use strict";

// --- Rounding: to the nearest float, in the middle to the one whose last digit is even --------------

// To so many binary digits; from 2 ** smallest down the spacing stays, beyond `largest` is infinity.
const roundingTo = ({digits, smallest, largest}) => x => {
  if (!Number.isFinite(x) || x === 0) return x;
  const spacing = spacingAt(x, digits, smallest), below = Math.floor(x / spacing), rest = x / spacing - below;
  const nearest = spacing * (rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below);
  return Math.abs(nearest) > largest ? Math.sign(x) * Infinity : nearest;
};
const spacingAt = (x, digits, smallest = -1022) => {
  let exponent = Math.floor(Math.log2(Math.abs(x)));
  if (2 ** exponent > Math.abs(x)) exponent--;  // the logarithm itself is rounded
  if (2 ** (exponent + 1) <= Math.abs(x)) exponent++;
  return 2 ** (Math.max(exponent, smallest) - digits + 1);
};
const FLOATS = {
  bfloat16: {digits: 8, smallest: -126, largest: (2 - 2 ** -7) * 2 ** 127},
  float16: {digits: 11, smallest: -14, largest: 65504},
  float32: {digits: 24, smallest: -126, largest: (2 - 2 ** -23) * 2 ** 127},
};
const roundings = {
  bfloat16: roundingTo(FLOATS.bfloat16), float16: roundingTo(FLOATS.float16), float32: Math.fround,
};

// --- Ways to add N ones -----------------------------------------------------------------------------

// After each of `counts` additions, which ascend, the sum. A sum that one addition leaves as it is has
// stuck: all later ones do the same to it.
const runningSums = (round, one, counts) => {
  let total = 0, done = 0, stuck = false;
  return counts.map(count => {
    for (; done < count && !stuck; done++) {
      const next = round(total + one);
      stuck = next === total;
      total = next;
    }
    return total;
  });
};

// Each gives the two numbers that its last addition adds, for all of the counts.
const CHUNK = 16;
const waysToAdd = {
  single: (round, counts) => runningSums(round, 1, counts.map(N => N - 1)).map(total => [total, 1]),
  // Sixteen ones are a sum of their own, and are added to the total together; the last may be fewer.
  chunks: (round, counts) => {
    const whole = counts.map(N => Math.ceil(N / CHUNK) - 1);
    const part = n => runningSums(round, 1, [n])[0];
    return runningSums(round, part(CHUNK), whole).map((total, i) => [total, part(counts[i] - CHUNK * whole[i])]);
  },
  // The first half, a power of two, and the rest; each is added in the same way.
  pairs: (round, counts) => {
    const known = {1: 1}, sumOf = N => (known[N] ??= round(sum(halves(N))));
    const halves = N => {
      if (N === 1) return [0, 1];
      const half = 2 ** Math.ceil(Math.log2(N) - 1);
      return [sumOf(half), sumOf(N - half)];
    };
    return counts.map(halves);
  },
};

// --- The page ---------------------------------------------------------------------------------------

explorable("fig-sums-stick", "Add ones: where does the sum stop?", ui => {
  // The counts to stop at: around each power of two, and between two of them.
  const COUNTS = [...new Set(Array.from({length: 26}, (_, p) =>
    [2 ** p - 1, 2 ** p, 2 ** p + 1, 3 * 2 ** (p - 1)]).flat())].filter(N => N >= 1 && N % 1 === 0).sort((a, b) => a - b);
  const LAST = COUNTS.at(-1);

  const steps = ui.row("explorable-stays").steps("N", {
    label: "ones added", count: COUNTS.length - 1, value: COUNTS.indexOf(192), every: 500, show: i => number(COUNTS[i]),
  });
  const knobs = ui.row();
  const format = knobs.choice("format", {
    label: "in", value: "bfloat16", options: Object.fromEntries(Object.keys(FLOATS).map(name => [name, name]))});
  const way = knobs.choice("way", {label: "added", value: "single", options: {
    single: "one by one", chunks: `in chunks of ${CHUNK}`, pairs: "in pairs", wide: "one by one, sum in float32"}});
  const top = ui.row("explorable-sides"), big = top.big("sum");
  const lineBox = top.row();
  ui.sentence();
  const growthBox = ui.row();
  ui.startAgain();

  // What the sum is kept in, and for all counts the last two numbers added and their sum.
  const kept = () => (way.value === "wide" ? "float32" : format.value);
  const known = {};
  const all = () => {
    const name = kept(), how = way.value === "wide" ? "single" : way.value;
    return known[`${name} ${how}`] ??= waysToAdd[how](roundings[name], COUNTS).map(([a, b]) => ({a, b, sum: roundings[name](a + b)}));
  };
  const now = () => all()[steps.value];

  // --- The floats around the last addition: they get sparse, and the step falls between two ---

  const height = 104, axis = 58, apart = gap => (gap < 1 ? `1/${number(1 / gap)}` : number(gap));
  lineBox.drawing("line", {height, paint: width => {
    const {a, b, sum} = now(), {digits} = FLOATS[kept()], exact = a + b;
    const low = Math.max(0, exact - 7 * b), high = low + 12 * b, across = x => 6 + (width - 12) * (x - low) / (high - low);
    const pixels = x => across(low + x) - across(low), gap = spacingAt(exact, digits);
    const shapes = [["path", {class: "axis", d: `M 0 ${axis} H ${width}`}]];
    if (!Number.isFinite(exact)) return {
      shapes: [...shapes, ["text", {x: width / 2, y: axis - 12, class: "middle"}, "beyond all floats"]],
      label: `What is added is infinity already: there are no floats of ${kept()} around it.`,
    };
    for (let x = low; x <= high;) {  // from float to float; those too close to be seen are a band
      const here = spacingAt(Math.max(x, 1e-9), digits), next = Math.floor(x / here + 1) * here;
      if (pixels(here) >= 4) {
        if (x % here === 0) shapes.push(["path", {class: "line blue float", d: `M ${across(x)} ${axis - 9} v 18`}]);
        [x] = [next];
      } else {
        const end = Math.min(high, 2 ** (Math.floor(Math.log2(Math.max(x, 1e-9))) + 1));  // of this spacing
        shapes.push(["rect", {class: "blue lit pale", x: across(x), y: axis - 9, width: across(end) - across(x), height: 18}]);
        x = end === x ? high + 1 : end === high ? high + 1 : end;
      }
    }
    const mark = (x, words, y, kind) => {
      const half = 4.4 * words.length;
      return ["text", {x: Math.max(half, Math.min(width - half, across(x))), y, class: `middle ${kind}`}, words];
    };
    shapes.push(
      ["circle", {cx: across(a), cy: axis, r: 5, class: "gray"}],
      ["path", {class: "line gray", d: `M ${across(a)} ${axis - 12} Q ${across(a + b / 2)} ${axis - 34} ${across(exact) - 3} ${axis - 12} m -6 -3 l 6 3 l 1 -7`}],
      ["path", {class: "line vermilion", d: `M ${across(exact) - 5} ${axis - 5} l 10 10 m 0 -10 l -10 10`}],
      mark(exact, `${number(a)} + ${number(b)}`, 16, "bold"),
      ["text", {x: 0, y: height - 4, class: "quiet small"}, `${kept()}: ${apart(gap)} apart at ${number(exact)}`],
    );
    if (Number.isFinite(sum)) shapes.push(
      ["circle", {cx: across(sum), cy: axis, r: 9, class: "line vermilion"}], mark(sum, number(sum), axis + 27, "vermilion bold"));
    return {shapes, label: `The floats of ${kept()} on a line: ${apart(gap)} apart at ${number(exact)}. ${number(a)} + ${number(b)} becomes ${number(sum)}.`};
  }});

  // --- The sum against the number of ones, both axes logarithmic ---

  growthBox.drawing("growth", {height: 196, paint: width => {
    const left = 40, right = width - 12, top = 12, bottom = 158, span = Math.log10(LAST);
    const across = N => left + (right - left) * Math.log10(N) / span, up = x => bottom - (bottom - top) * Math.log10(x) / span;
    const sums = all(), N = COUNTS[steps.value], {sum} = now();
    const points = COUNTS.map((count, i) => [count, sums[i].sum]).slice(0, steps.value + 1).filter(([, sum]) => Number.isFinite(sum));
    const shapes = [["path", {class: "axis", d: `M ${left} ${top} V ${bottom} H ${right}`}]];
    for (const power of [0, 2, 4, 6]) shapes.push(
      ["path", {class: "axis", d: `M ${left} ${up(10 ** power)} H ${right}`, "stroke-dasharray": "2 4"}],
      ["text", {x: left - 6, y: up(10 ** power) + 4, class: "end quiet"}, powerOfTen(power)],
      ["text", {x: across(10 ** power), y: bottom + 18, class: "middle quiet"}, powerOfTen(power)]);
    shapes.push(
      ["text", {x: right, y: bottom + 35, class: "end quiet"}, "ones added"], ["text", {x: left + 6, y: top + 4, class: "halo quiet"}, "sum"],
      ["path", {class: "line gray dashed", d: `M ${left} ${bottom} L ${right} ${top}`}],
      ["text", {x: right - 70, y: top + 8, class: "end quiet"}, "exact"],
      ["path", {class: "line blue", d: `M ${points.map(([count, sum]) => `${across(count)} ${up(sum)}`).join(" L ")}`, "stroke-width": 3}],
      ["path", {class: "axis", d: `M ${across(N)} ${top} V ${bottom}`}]);
    if (Number.isFinite(sum)) shapes.push(
      ["circle", {cx: across(N), cy: up(sum), r: 5, class: "blue"}],
      sum < 0.9 * N && ["text", {x: across(N) - 4, y: up(sum) + 19, class: "end halo blue bold"}, number(sum)]);
    return {shapes, label: `The sum against the number of ones, both axes logarithmic, up to ${number(N)} ones: ${number(sum)}. The exact line goes straight up.`};
  }});

  const story = () => {
    const N = COUNTS[steps.value], {a, b, sum} = now(), name = kept(), exact = a + b, gap = spacingAt(exact, FLOATS[name].digits);
    const adds = `${number(a)} + ${number(b)}`, lost = N - sum;
    if (exact === Infinity) return `Sums beyond ${number(FLOATS[name].largest)}, the largest ${name}, are infinity.`;
    if (sum === Infinity) return `The largest ${name} is ${number(FLOATS[name].largest)}: ${adds} overflows to infinity.`;
    const below = Math.floor(exact / gap) * gap, tie = exact - below === gap / 2;
    const how = sum === exact ? `${adds} = ${number(exact)} is a float of ${name}`
      : tie ? `${adds} lies midway between ${number(below)} and ${number(below + gap)}: the tie goes to ${number(sum)}, whose last binary digit is 0`
        : `${adds} goes to the nearest float, ${number(sum)}`;
    const end = sum === a && way.value !== "pairs" ? ` The sum is stuck, and ${several(lost, "one").replace(String(lost), number(lost))} ${lost === 1 ? "is" : "are"} lost.`
      : lost ? ` It should be ${number(N)}.` : " Nothing is lost.";
    const round = name !== format.value && roundings[format.value](sum);
    return `${how}.${end}` + (round === false ? "" : ` Rounded once, at the end, to ${format.value}: ${number(round)}.`);
  };

  ui.redraw(() => {
    big.show(number(now().sum), `the sum of ${number(COUNTS[steps.value])} ones`);
    ui.say(story());
  });
});
