// One query and five keys in the plane: the weights that different similarities give to the keys.

"use strict";

// --- The feature maps of the chapter -------------------------------------------------------------

// x′: query and key are both scaled, so that q′ · k′ is s = q · k / √D.
const scaledDown = x => x.map(entry => entry * x.length ** -0.25);

const featureMaps = {
  elu: x => x.map(entry => (entry > 0 ? entry + 1 : Math.exp(entry))),
  relu,
  // φ(q) · φ(k) = 1 + s + s²/2
  taylor: x => {
    const y = scaledDown(x);
    const pairs = y.flatMap((a, i) => y.slice(i).map((b, j) => (j ? a * b : a * a / Math.SQRT2)));
    return [1, ...y, ...pairs];
  },
  // φ(q) · φ(k) is the exponential of s on average over the rows w.
  random: rows => x => {
    const y = scaledDown(x);
    return rows.map(w => Math.exp(dot(w, y) - dot(y, y) / 2) / Math.sqrt(rows.length));
  },
};

// The weights of one query; a largest exponent is subtracted, which changes nothing but overflow.
const softmaxWeights = (q, keys) => {
  const s = keys.map(k => dot(q, k) / Math.sqrt(q.length));
  const A = s.map(x => Math.exp(x - Math.max(...s)));
  return A.map(a => a / sum(A));
};
const weightsOf = phi => (q, keys) => {
  const A = keys.map(k => dot(phi(q), phi(k)));
  return A.map(a => a / sum(A));  // 0/0, not a number, where all similarities are 0
};

const entropy = weights => -sum(weights.map(a => (a === 0 ? 0 : a * Math.log(a))));
const moved = (weights, others) => sum(weights.map((a, j) => Math.abs(a - others[j]))) / 2;

// --- The page ------------------------------------------------------------------------------------

explorable("fig-plane-weights", "Drag the query and the keys: whose weights follow softmax?", ui => {
  const START = {q: [2, 1], keys: [[1, 0], [0, 1], [1, 1], [-1, 1], [-1, -1]]};
  let q = START.q, keys = [...START.keys];
  const keyName = j => `k${subscript(j + 1)}`;

  const both = ui.row();
  const left = both.group("The query and five keys"), right = both.group("Weights, and softmax as a line");
  right.box.style.flex = "2 1 22rem";

  // --- The plane ---

  const square = left.row();
  const factor = left.slider("factor", {
    label: "query times", values: [0.25, 0.5, 1, 2, 4, 8], value: 1, show: x => brief(x),
  });
  const query = () => q.map(x => factor.value * x);
  const {reach, size, toPixels, fromPixels, snap, step, grid, arrow, names} = plane(3);
  const drawing = square.drawing("plane", {height: size, paint: width => ({
    label: `The plane. q = ${listed(q)}, ${keys.map((k, j) => `${keyName(j)} = ${listed(k)}`).join(", ")}.`,
    shapes: [
      ...grid(width),
      arrow(query(), "green", width, "stroke-width: 9; stroke-opacity: 0.3"),  // as long as it is taken
      ...keys.map(k => arrow(k, "blue", width)), arrow(q, "green", width),
      ...names([
        ...keys.map((k, j) => ({at: k, words: keyName(j), color: "blue"})), {at: q, words: "q", color: "green"},
      ], width),
    ],
  })});
  const place = {reach, toPixels, fromPixels, snap, step};
  drawing.handle("drag-q", {
    label: "query q", color: "green", ...place, position: () => q, move: (x, y) => { q = [x, y]; },
  });
  keys.forEach((_, j) => drawing.handle(`drag-k${j + 1}`, {
    label: `key ${keyName(j)}`, ...place, position: () => keys[j], move: (x, y) => { keys[j] = [x, y]; },
  }));
  const taken = left.text("");

  // --- The weights ---

  const MAPS = {softmax: "softmax", taylor: "Taylor", random: "random", elu: "elu + 1", relu: "ReLU"};
  const rows = () => ({
    softmax: softmaxWeights,
    taylor: weightsOf(featureMaps.taylor),
    random: weightsOf(featureMaps.random(randomRows(seed.value, m.value))),
    elu: weightsOf(featureMaps.elu),
    relu: weightsOf(featureMaps.relu),
  });
  const table = right.matrix("weights", {
    label: `Entropy in nats: ${number(Math.log(5), 2)} if all weights are equal`,
    rows: Object.values(MAPS), columns: [...keys.map((_, j) => keyName(j)), "entropy"],
  });
  ui.sentence();
  const more = ui.fold("The random features").row();
  const m = more.slider("m", {label: "random features m", values: [1, 4, 16, 64], value: 16});
  const seed = more.choice("seed", {label: "random draw", options: {0: "1", 1: "2", 2: "3"}, value: "0"});
  ui.startAgain(() => { q = START.q; keys = [...START.keys]; });

  // A cell filled to a share of its height, with a line across at another share. All of the weight
  // fills 60%: a line there is no border of the row, and stays below the number.
  const filled = (share, line) => `linear-gradient(to top, transparent calc(${60 * line}% - 1px),`
    + ` var(--ex-vermilion) 0 calc(${60 * line}% + 1.5px), transparent 0),`
    + ` linear-gradient(to top, color-mix(in srgb, var(--ex-blue) 45%, transparent) ${60 * share}%, transparent 0)`;

  ui.redraw(() => {
    const ways = rows();
    const weights = Object.keys(MAPS).map(way => ways[way](query(), keys));
    const [softmax] = weights, none = weights.at(-1).some(Number.isNaN);
    table.show(weights.map(row => [...row, entropy(row)].map(x => (Number.isNaN(x) ? null : x))), {
      text: (x, i, j) => (x !== null ? number(x, 2) : j < keys.length ? "0/0" : "none"),
      mark: (i, j) => (j < keys.length ? "tall" : ""), tint: false,
      background: (x, i, j) => (j < keys.length ? filled(x || 0, softmax[j]) : ""),
    });
    taken.show(`${brief(factor.value)} q = ${listed(query())}`.replace(/^1 /, ""));
    ui.say(none ? "ReLU: every similarity is 0, and 0/0 is no weight. The package returns the output 0." : tell(weights));
  });

  // Where a map turns the order of two keys around, or else how far each map is from softmax.
  function tell([softmax, ...others]) {
    const [taylor] = others, all = keys.map((_, j) => j);
    for (const i of all)
      for (const j of all)
        if (softmax[i] > softmax[j] + 1e-9 && taylor[j] > taylor[i] + 1e-9)
          return `Taylor prefers ${keyName(j)} to ${keyName(i)}, softmax does not: left of s = −1 the parabola rises again.`;
    const far = others.map(row => moved(row, softmax));
    const nearest = far.indexOf(Math.min(...far));
    return `Nearest to softmax: ${Object.values(MAPS)[nearest + 1]}. ${number(far[nearest], 2)} of its weight stands at other keys.`;
  }
});

// numpy.random.default_rng(seed).standard_normal((64, 2)) for the seeds 0, 1 and 2, to five digits.
// The first m rows are those of positive_random_features(m, 2, orthogonal=False, seed=seed).
function randomRows(seed, m) {
  return [
    [
      [0.12573, -0.1321], [0.64042, 0.1049], [-0.53567, 0.3616], [1.304, 0.94708], [-0.70374, -1.26542],
      [-0.62327, 0.04133], [-2.32503, -0.21879], [-1.24591, -0.73227], [-0.54426, -0.3163], [0.41163, 1.04251],
      [-0.12853, 1.36646], [-0.66519, 0.35151], [0.90347, 0.09401], [-0.7435, -0.92173], [-0.45773, 0.2202],
      [-1.00962, -0.20918], [-0.15923, 0.54085], [0.21466, 0.35537], [-0.65383, -0.12961], [0.78398, 1.49343],
      [-1.25907, 1.51392], [1.34588, 0.78131], [0.26446, -0.31392], [1.45802, 1.96026], [1.80163, 1.3151],
      [0.35738, -1.20832], [-0.00445, 0.65647], [-1.28836, 0.39512], [0.42986, 0.69604], [-1.18412, -0.6617],
      [-0.43644, -1.1698], [1.73937, -0.49591], [0.32897, -0.25857], [1.58347, 1.32036], [0.63335, -2.20351],
      [0.05203, 0.68369], [1.00396, -0.61791], [1.82201, -1.32043], [-0.66153, 0.93505], [0.04905, 2.00239],
      [0.18852, -0.63319], [-0.37756, -1.09115], [-1.27768, 0.63041], [0.58117, 1.29456], [-0.75461, 1.68911],
      [-0.28739, 1.57441], [-0.43279, -0.73548], [0.24979, 1.03145], [0.16101, -0.58553], [-1.34122, -1.40152],
      [0.50268, 0.98971], [-0.16429, -1.07436], [0.87304, -1.28039], [-0.71307, 0.62102], [-2.25014, 0.38637],
      [-0.58164, 0.10928], [-0.0757, 0.20211], [0.69417, -0.75837], [1.42098, 0.72609], [0.84373, 1.16486],
      [0.78759, 0.84408], [0.07559, -1.42677], [-0.13505, -0.76951], [-1.42274, 0.25845],
    ],
    [
      [0.34558, 0.82162], [0.33044, -1.30316], [0.90536, 0.44637], [-0.53695, 0.58112], [0.36457, 0.29413],
      [0.02842, 0.54671], [-0.73645, -0.16291], [-0.48212, 0.59885], [0.03972, -0.29246], [-0.78191, -0.25719],
      [0.00814, -0.2756], [1.29406, 1.00672], [-2.71116, -1.88901], [-0.17477, -0.42219], [0.21364, 0.21732],
      [2.11784, -1.11202], [-0.37761, 2.04277], [0.6467, 0.66306], [-0.51401, -1.64808], [0.16746, 0.10901],
      [-1.22735, -0.68323], [-0.07204, -0.94475], [-0.09827, 0.09548], [0.03559, -0.50629], [0.59375, 0.89117],
      [0.32085, -0.81823], [0.73165, -0.50144], [0.87916, -1.07179], [0.91447, -0.02006], [-1.24875, -0.3139],
      [0.0541, 0.27279], [-0.98219, -1.10737], [0.19958, -0.46675], [0.23551, 0.75952], [-1.64879, 0.25439],
      [1.22465, -0.29753], [-0.81081, 0.75224], [0.25345, 0.89588], [-0.34522, -1.48182], [-0.11001, -0.44583],
      [0.77532, 0.19363], [-1.63085, -1.19516], [0.88379, 0.67977], [-0.64024, -0.00105], [0.44557, 0.4684],
      [0.87624, 0.25649], [-0.09483, -0.25885], [1.05574, -2.25085], [-0.13866, 0.033], [-1.42535, 0.33281],
      [-0.65128, 0.86244], [-0.12559, 0.66915], [1.21884, 0.38293], [-0.87572, -1.51432], [1.75338, -0.11129],
      [-0.68856, 0.14426], [-0.19141, 0.85214], [0.03393, 0.01375], [-0.71458, 0.46957], [-1.03387, 0.66589],
      [1.52394, -1.52469], [-2.46623, 0.61688], [2.5479, -1.00092], [-1.2507, 0.58897],
    ],
    [
      [0.18905, -0.52275], [-0.41306, -2.44147], [1.79971, 1.14417], [-0.32542, 0.77381], [0.28121, -0.55382],
      [0.97757, -0.31056], [-0.32882, -0.79215], [0.45496, -0.0992], [0.54529, -0.60719], [0.12683, -0.89227],
      [0.84146, 0.18804], [0.33057, 0.4105], [-1.01076, 0.78318], [2.0567, -1.63844], [-1.72941, -1.50483],
      [0.84146, 0.12872], [1.07834, 0.72243], [0.21057, 0.28404], [-0.16976, 0.86846], [-1.12972, -0.42186],
      [0.24294, 1.80142], [-0.76446, -1.07906], [-0.56329, 0.96927], [-0.23501, 1.32435], [-1.87253, 1.12852],
      [1.03487, -1.41867], [0.15358, 1.21576], [0.08792, 0.9997], [2.37489, 0.27393], [-0.28038, -0.77105],
      [0.64806, -0.19673], [-0.17875, -0.10526], [0.64987, -1.06634], [-1.52988, -2.43388], [1.19867, 0.07379],
      [1.51012, -0.00896], [-0.74216, 0.47793], [-0.07659, -1.25419], [-0.88507, 1.76678], [0.35435, 0.41639],
      [-0.27655, -0.68972], [0.89166, -0.10463], [-0.75911, -0.13413], [-0.90561, 0.19005],
      [1.12923, -0.83609], [1.42854, -0.66762], [0.15341, -0.83639], [-0.22224, 0.0474], [-0.43468, -0.70289],
      [-0.67789, -0.82116], [-1.57008, -0.26297], [0.40116, 0.9084], [0.6471, 2.45734], [0.31868, -0.45633],
      [1.87163, -1.04722], [0.96848, -0.95514], [0.35411, -1.9684], [0.89927, -0.15825], [-0.96768, 1.67842],
      [0.76535, 0.04581], [-0.74544, -0.04336], [-0.16393, 0.72478], [0.79808, -0.66776], [-0.54937, -0.53207],
    ],
  ][seed].slice(0, m);
}
