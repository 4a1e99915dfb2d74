// What the explorables share. Each is a file of its own that calls
//
//     explorable("fig-of-the-book", "What one can do here", ui => { ... });
//
// The figure's picture is kept for paper and for readers without scripts; on screen `ui` stands in
// its place. A control is read by its `value` and written by the same name:
//
//     const N = ui.slider("N", {label: "tokens N", values: [16, 32, 64], value: 32});
//     const entries = ui.readout("entries", "numbers in the matrix");
//     ui.sentence();                                    // what `say` says stands here
//     ui.startAgain();                                  // a button for the first values of all controls
//     ui.redraw(() => {                                 // now, and after every input
//       entries.show(N.value ** 2);
//       ui.say(`Twice the tokens would have ${4 * N.value ** 2} entries.`);
//     });
//
// The name of a control or readout is its data-name in the page, unique within the explorable.

"use strict";

const explorable = (figureId, title, build) => {
  const figure = document.getElementById(figureId);
  if (!figure) return;
  const root = element("section", {class: "explorable", "aria-label": title});
  root.append(element("p", {class: "explorable-title"}, title));
  // The sentence stands on the page at once. A screen reader is told when it has come to rest, and
  // not at every point of a drag.
  const said = element("p", {class: "explorable-said", "aria-hidden": "true"});
  const told = element("p", {class: "explorable-told", role: "status"});
  let rest;
  figure.prepend(root);
  figure.classList.add("explored");

  const redraws = [];
  let waiting = false;
  const change = () => {  // many inputs in one frame are one drawing
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; redraws.forEach(redraw => redraw()); });
  };
  const common = {
    // Draw now, after every input, and when the width has changed.
    redraw(draw) { redraws.push(draw); draw(); },
    change,
    // What there is to see now, in one sentence; it stands where `ui.sentence()` was called.
    say(text) {
      if (said.textContent === text) return;
      said.textContent = text;
      clearTimeout(rest);
      if (told.isConnected) rest = setTimeout(() => { told.textContent = text; }, 700);
      else told.textContent = text;  // the first words are there to be found, no news
    },
    said,
    firsts: [],  // functions that give controls their first values again
  };
  build(panel(root, common));
  root.append(told);

  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (root.clientWidth !== width) { width = root.clientWidth; change(); }
  }).observe(root);
};

// --- Parts of a page ---------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const QUIET = {"aria-live": "off"};  // an output would be read aloud at every change
const FRESH = {autocomplete: "off"};  // or else going back to a page fills in what was typed before

const make = (node, attributes, content) => {
  for (const [key, value] of Object.entries(attributes))
    if (value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  if (content !== undefined) node.append(content);
  return node;
};

const element = (tag, attributes = {}, content) =>
  make(document.createElement(tag), attributes, content);

const uniqueId = (() => { let count = 0; return () => `explorable-${++count}`; })();

// What stands in a box: controls, drawings, numbers, and boxes in it.
const panel = (box, common) => {
  const ui = {...common, box};
  const add = node => { box.append(node); return node; };

  const labelled = (name, label, input, shown) => {
    const id = uniqueId();
    make(input, {id, "data-name": name});
    const line = element("div", {class: "explorable-control"});
    line.append(element("label", {for: id}, label), input);
    if (shown) line.append(shown);
    return add(line);
  };

  // Boxes: side by side where there is room. `group` has a heading, `row` has none.
  ui.row = kind => panel(add(element("div", {class: `explorable-row ${kind || ""}`})), common);
  ui.group = heading => {
    const inner = add(element("div", {class: "explorable-group", role: "group", "aria-label": heading}));
    inner.append(element("p", {class: "explorable-heading"}, heading));
    return panel(inner, common);
  };
  // A group that is folded at first on a phone.
  ui.fold = heading => {
    const inner = add(element("details", {class: "explorable-group", open: innerWidth > 600}));
    inner.append(element("summary", {class: "explorable-heading"}, heading));
    return panel(inner, common);
  };
  ui.sentence = () => { add(common.said); };
  ui.text = words => {
    const line = add(element("p", {class: "explorable-text"}, words));
    return {show(text) { line.textContent = text; }};
  };

  // A slider over `values`, or over min, max, step. `show(value)` is what stands beside it.
  ui.slider = (name, {label, values, min, max, step = 1, value, show: shown = String}) => {
    const output = element("output", {class: "explorable-value", ...QUIET});
    const range = values ? {min: 0, max: values.length - 1, step: 1} : {min, max, step};
    const input = element("input", {type: "range", ...FRESH, ...range});
    const read = () => (values ? values[Number(input.value)] : Number(input.value));
    const tell = () => {
      output.textContent = shown(read());
      input.setAttribute("aria-valuetext", shown(read()));
    };
    labelled(name, label, input, output);
    input.addEventListener("input", () => { tell(); ui.change(); });
    const control = {
      input,
      get value() { return read(); },
      set value(next) {
        input.value = values ? values.indexOf(next) : next;
        tell();
      },
    };
    const first = () => { control.value = value; };
    common.firsts.push(first);
    first();
    return control;
  };

  // One of a few: {value: label, ...}
  ui.choice = (name, {label, options, value}) => {
    const field = element("fieldset", {class: "explorable-choice", "data-name": name});
    field.append(element("legend", {}, label));
    const group = uniqueId();
    for (const [key, words] of Object.entries(options)) {
      const id = uniqueId();
      const input = element("input", {
        type: "radio", ...FRESH, name: group, id, value: key, checked: key === value,
      });
      input.addEventListener("change", () => ui.change());
      field.append(input, element("label", {for: id}, words));
    }
    add(field);
    const control = {
      get value() { return field.querySelector("input:checked").value; },
      set value(next) { for (const input of field.querySelectorAll("input")) input.checked = input.value === next; },
    };
    common.firsts.push(() => { control.value = value; });
    return control;
  };

  ui.button = (name, label, act) => {
    const button = add(element("button", {type: "button", "data-name": name}, label));
    button.addEventListener("click", () => { act(); ui.change(); });
    return {
      // Gray, but in its place among the tab stops: who pressed it last would lose the focus.
      set idle(off) { button.setAttribute("aria-disabled", off); },
    };
  };

  // All controls as they were first; `act` does the same for what only handles move.
  ui.startAgain = (act = () => {}) => ui.button("reset", "start again", () => {
    common.firsts.forEach(first => first());
    act();
  });

  // A position from `first` to count, to be scrubbed, or gone through with buttons.
  ui.steps = (name, {label, first = 0, count, value = first, show = String}) => {
    const line = ui.row("explorable-steps");
    const go = to => { slider.value = Math.max(first, Math.min(count, to)); };
    const back = line.button(`${name}-back`, "◀ back", () => go(slider.value - 1));
    const next = line.button(`${name}-next`, "step ▶", () => go(slider.value + 1));
    const slider = line.slider(name, {label, min: first, max: count, value, show});
    ui.redraw(() => {
      back.idle = slider.value === first;
      next.idle = slider.value === count;
    });
    return {
      get value() { return slider.value; },
      set value(to) { go(to); },
    };
  };

  // Small arrays of numbers that the reader types: rows of entries, or one row. The names of rows are
  // not shown where heads is false. `step` is for the arrow keys; any number is taken from min to
  // max, with at most `digits` after the point where the fields are narrow.
  ui.numbers = (name, {
    label, rows, columns, values, min = -99, max = 99, step = 1, digits = 20, heads = true,
  }) => {
    const table = element("table", {class: "explorable-numbers", "data-name": name});
    table.append(element("caption", {}, label));
    const state = values.map(row => [...row]);
    const inputs = state.map((row, i) => {
      const line = element("tr");
      if (rows && heads) line.append(element("th", {scope: "row"}, rows[i]));
      const cells = row.map((x, j) => {
        const input = element("input", {  // no inputmode: some keyboards for decimals have no minus
          type: "number", ...FRESH, min, max, step, value: x,
          "aria-invalid": "false",  // a browser would call numbers between the steps invalid
          "aria-label": `${label}, ${rows ? rows[i] : ""} ${columns ? columns[j] : j + 1}`,
        });
        input.addEventListener("input", () => {  // until it is a number, the last one counts
          const number = input.valueAsNumber;
          const good = number >= min && number <= max && Number(number.toFixed(digits)) === number;
          input.setAttribute("aria-invalid", !good);
          if (good) { state[i][j] = number; ui.change(); }
        });
        input.addEventListener("blur", () => {
          input.value = state[i][j];
          input.setAttribute("aria-invalid", false);
        });
        const cell = element("td", {}, input);
        line.append(cell);
        return input;
      });
      table.append(line);
      return cells;
    });
    add(table);
    const control = {
      get value() { return state.map(row => [...row]); },
      set value(next) {
        next.forEach((row, i) => row.forEach((x, j) => { state[i][j] = x; inputs[i][j].value = x; }));
      },
    };
    common.firsts.push(() => { control.value = values; });
    return control;
  };

  // A number with a name: shows text or, with `digits`, a number.
  ui.readout = (name, label) => {
    const line = add(element("p", {class: "explorable-readout"}));
    const output = element("output", {"data-name": name, ...QUIET});
    line.append(element("span", {}, `${label} `), output);
    return {show(x, digits) { output.textContent = typeof x === "number" ? number(x, digits) : x; }};
  };

  // A table of numbers to read. show(matrix, {digits, mark(i, j), text(x, i, j)}): cells are tinted by
  // their size and sign, or as `background(x, i, j)` says; `mark` gives a cell a class, such as "new".
  ui.matrix = (name, {label, rows, columns, wide = false}) => {
    const holder = add(element("div", {class: "explorable-scroll"}));
    const table = element("table", {class: `explorable-matrix ${wide ? "wide" : ""}`, "data-name": name});
    holder.append(table);
    return {
      show(matrix, {
        digits = 2, text = x => number(x, digits), mark = () => "", tint = true, background = () => "",
        heads = [rows, columns], caption = label,
      } = {}) {
        const [down, across] = heads;
        const largest = Math.max(1e-12, ...matrix.flat().map(x => Math.abs(x) || 0));
        const lines = [element("caption", {}, caption)];
        if (across) {
          const head = element("tr");
          if (down) head.append(element("td"));
          across.forEach(word => head.append(element("th", {scope: "col"}, word)));
          lines.push(head);
        }
        matrix.forEach((row, i) => {
          const line = element("tr");
          if (down) line.append(element("th", {scope: "row"}, down[i]));
          row.forEach((x, j) => {
            const cell = element("td", {class: mark(i, j)}, Number.isNaN(x) ? "" : text(x, i, j));
            cell.style.background = background(x, i, j) || (tint && x ? shade(x / largest) : "");
            line.append(cell);
          });
          lines.push(line);
        });
        table.replaceChildren(...lines);
      },
    };
  };

  // A drawing as wide as there is room, in pixels. `paint(width)` returns what it shows, as
  // [tag, attributes, text] or elements from `draw`, and what it is in words:
  //     ui.drawing("bars", {height: 120, paint: width => ({label: "Three bars ...", shapes: [...]})})
  // Handles stand above the painting: see ui.drawing(...).handle.
  ui.drawing = (name, {height, paint}) => {
    const svg = make(document.createElementNS(SVG, "svg"), {class: "explorable-drawing", role: "img", "data-name": name});
    const holder = add(element("div", {class: "explorable-canvas"}));
    holder.append(svg);
    let width = 0;
    const tall = () => (typeof height === "function" ? height(width) : height);
    const repaint = () => {
      width = Math.floor(holder.clientWidth) || 320;
      const {label, shapes} = paint(width);
      make(svg, {width, height: tall(), viewBox: `0 0 ${width} ${tall()}`, "aria-label": label});
      svg.replaceChildren(...shapes.filter(Boolean).map(([tag, attributes, text]) =>
        make(document.createElementNS(SVG, tag), attributes, text)));
      handles.forEach(place => place(width));
    };
    const handles = [];
    ui.redraw(repaint);
    return {
      // A point that is dragged by mouse or finger, or moved by the arrow keys. `position()` is where
      // it stands as [x, y] in its own units, from -reach to reach, `move(x, y)` is told where it goes;
      // `toPixels` and `fromPixels` translate: (x, y, width) => [x, y]. There is no role for a slider in
      // two directions; that of one in one direction makes a screen reader pass the arrow keys on.
      handle(key, {label, position, move, reach, toPixels, fromPixels, step = 0.1, color = "blue"}) {
        const knob = element("button", {
          type: "button", class: `explorable-handle ${color}`, "data-name": key, "aria-label": label,
          role: "slider", "aria-roledescription": "point, moved by the arrow keys",
          "aria-valuemin": -reach, "aria-valuemax": reach,
        });
        holder.append(knob);
        const place = () => {
          const [x, y] = position(), [left, top] = toPixels(x, y, width);
          Object.assign(knob.style, {left: `${left}px`, top: `${top}px`});
          make(knob, {"aria-valuenow": Math.max(-reach, Math.min(reach, x)), "aria-valuetext": `${number(x, 2)}, ${number(y, 2)}`});
        };
        handles.push(place);
        place();
        const follow = event => {
          const box = svg.getBoundingClientRect();
          move(...fromPixels(event.clientX - box.left, event.clientY - box.top, width));
          ui.change();
        };
        knob.addEventListener("pointerdown", event => {
          if (event.button) return;  // a menu may keep the end of such a drag to itself
          knob.setPointerCapture(event.pointerId);
          knob.addEventListener("pointermove", follow);
        });
        knob.addEventListener("lostpointercapture", () => knob.removeEventListener("pointermove", follow));
        knob.addEventListener("keydown", event => {
          const way = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}[event.key];
          if (!way) return;
          event.preventDefault();
          const [x, y] = position();
          move(x + way[0] * step, y + way[1] * step);
          ui.change();
        });
      },
    };
  };

  return ui;
};

// --- Numbers -----------------------------------------------------------------------------------

// With digits after the point, or an integer with commas; a real minus sign.
const number = (x, digits) => {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "not a number" : x > 0 ? "∞" : "−∞";
  const text = digits === undefined ? Math.round(x).toLocaleString("en-US") : x.toFixed(digits);
  return Number(text.replaceAll(",", "")) === 0 ? text.replace("-", "") : text.replace("-", "−");
};

// The same, but 2.5e6 where digits would fill a row.
const scientific = (x, digits) => x.toExponential(digits).replace("+", "").replaceAll("-", "−");
const compact = (x, digits) => (Math.abs(x) < 1e6 ? number(x, digits) : scientific(x, digits || 1));

// With as many digits as it needs, up to `most`.
const brief = (x, most = 2) => compact(x, most).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

// In words and signs: [1, 0.5], "1 step" or "2 steps", and j as it stands below a letter.
const listed = (vector, show = brief) => `[${vector.map(x => show(x)).join(", ")}]`;
const several = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
const subscript = j => [...String(j)].map(digit => "₀₁₂₃₄₅₆₇₈₉"[digit]).join("");

const powerOfTen = power =>
  `10${[...String(power)].map(sign => "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"["0123456789-".indexOf(sign)]).join("")}`;

// The next of 1, 2, 5, 10, 20, ...: an axis that ends there does not move with every input.
const roundUp = x => {
  if (x <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map(factor => factor * power).find(end => end >= x * (1 - 1e-9));
};

// Positive numbers are blue, negative ones vermilion, as in the book's figures.
const shade = share =>
  `color-mix(in srgb, var(--ex-${share < 0 ? "vermilion" : "blue"}) ${Math.round(8 + 37 * Math.min(1, Math.abs(share)))}%, transparent)`;

// A square of the plane around zero, in which handles stand: `plane(3)` reaches from −3 to 3. It
// translates for handles, and snaps to a grid; `arrow` and `name` are shapes of one vector.
const plane = (reach, {largest = 270, margin = 0.25, step = 0.25} = {}) => {
  const size = width => Math.min(width, largest);
  const unit = width => size(width) / 2 / (reach + margin);
  const toPixels = (x, y, width) => [width / 2 + x * unit(width), size(width) / 2 - y * unit(width)];
  const inside = x => Math.max(-reach, Math.min(reach, Math.round(x / step) * step));
  const path = (points, width) => `M ${points.map(([x, y]) => toPixels(x, y, width).join(" ")).join(" L ")}`;
  return {
    reach, size, unit, step, toPixels,
    fromPixels: (left, top, width) => [(left - width / 2) / unit(width), (size(width) / 2 - top) / unit(width)],
    snap: (x, y) => [inside(x), inside(y)],
    grid: width => {
      const lines = Array.from({length: 2 * reach + 1}, (_, i) => i - reach);
      return lines.flatMap(n => [[[n, -reach], [n, reach]], [[-reach, n], [reach, n]]].map(ends =>
        ["path", {class: `axis ${n ? "dotted" : ""}`, d: path(ends, width)}]));
    },
    arrow: (vector, kind, width, style) => ["path", {class: `line ${kind}`, d: path([[0, 0], vector], width), style}],
    // Beyond the tip; above, below or beside it where that is outside the drawing.
    name: ([x, y], words, color, width) => {
      const length = Math.hypot(x, y), [px, py] = toPixels(x, y, width), half = 4 * words.length;
      const [across, up] = length ? [x / length, y / length] : [0, -1];
      const wanted = px + across * (15 + half * Math.abs(across));
      const left = Math.max(half + 2, Math.min(width - half - 2, wanted));
      const top = left === wanted ? py - up * 17 + 4 : py > 40 ? py - 16 : py + 26;
      const inside = top >= 14 && top <= size(width) - 4;
      const at = inside ? {x: left, y: top} : {x: px + (px > width - 2 * half - 24 ? -1 : 1) * (13 + half), y: py + 5};
      return ["text", {...at, class: `middle bold halo ${color}`}, words];
    },
  };
};

// The mathematics that all explorables need; vectors are arrays, matrices are arrays of rows.
const sum = x => x.reduce((total, one) => total + one, 0);
const dot = (a, b) => sum(a.map((x, i) => x * b[i]));
const zeros = (rows, columns) => Array.from({length: rows}, () => Array(columns).fill(0));
const outer = (a, b) => a.map(x => b.map(y => x * y));
const transpose = matrix => matrix[0].map((_, j) => matrix.map(row => row[j]));
const addMatrices = (A, B) => A.map((row, i) => row.map((x, j) => x + B[i][j]));
const addVectors = (a, b) => a.map((x, i) => x + b[i]);
const scaleMatrix = (factor, A) => A.map(row => row.map(x => factor * x));
const vectorTimesMatrix = (vector, matrix) => transpose(matrix).map(column => dot(vector, column));
const relu = vector => vector.map(x => Math.max(x, 0));
