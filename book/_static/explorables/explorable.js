// What the explorables share. Each is a file of its own that calls
//
//     explorable("fig-of-the-book", "What one can do here", ui => { ... });
//
// The figure's picture is kept for paper and for readers without scripts; on screen `ui` stands in
// its place. A control is read by its `value` and written by the same name:
//
//     const N = ui.slider("N", {label: "tokens N", values: [16, 32, 64], value: 32});
//     const t = ui.steps("t", {label: "token t", count: 3, value: 1});  // stepped through, or played
//     const entries = ui.readout("entries", "numbers in the matrix");
//     ui.sentence();                                    // what `say` says stands here
//     const more = ui.fold("Other numbers");            // fields and tables, folded at first
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
  let waiting = false, drawn = [];
  const change = () => {  // many inputs in one frame are one drawing
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      redraws.forEach(redraw => redraw());
      drawn.forEach(act => act());
      drawn = [];
    });
  };
  const tell = text => {
    clearTimeout(rest);
    rest = setTimeout(() => { told.textContent = text; }, 700);
  };
  const common = {
    // Draw now, and after every input.
    redraw(draw) { redraws.push(draw); draw(); },
    change,
    onceDrawn(act) { drawn.push(act); },
    // What there is to see now, in one sentence; it stands where `ui.sentence()` was called.
    say(text) {
      if (said.textContent === text) return;
      said.textContent = text;
      if (told.isConnected) tell(text);
      else told.textContent = text;  // the first words are there to be found, no news
    },
    tell,
    said,
    // A write is seen: a box goes from one part of the page into another, where motion is welcome.
    fly(from, to, color, duration = 800) {
      if (!from || !to || STILL.matches) return;
      const box = root.getBoundingClientRect(), [a, b] = [from, to].map(node => node.getBoundingClientRect());
      if (!a.width || !b.width) return;  // one of them is folded
      const ghost = element("div", {class: `explorable-ghost ${color}`, "aria-hidden": "true"});
      const at = ({left, top, width, height}) => ({
        left: `${left - box.left}px`, top: `${top - box.top}px`, width: `${width}px`, height: `${height}px`});
      root.append(ghost);
      ghost.animate([{...at(a), opacity: 0.9}, {...at(b), opacity: 0.9, offset: 0.85}, {...at(b), opacity: 0}],
        {duration, easing: "ease-in-out"}).finished.finally(() => ghost.remove());
    },
    root,
    firsts: [],  // functions that give controls their first values again
  };
  build(panel(root, common));
  root.append(told);
};

// --- Parts of a page ---------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const QUIET = {"aria-live": "off"};  // an output would be read aloud at every change
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
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
  // Folded at first: what a reader can do without.
  ui.fold = heading => {
    const inner = add(element("details", {class: "explorable-fold"}));
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

  // Each on or off: {value: label, ...}
  ui.switches = (name, {label, options}) => {
    const field = element("fieldset", {class: "explorable-choice", "data-name": name});
    field.append(element("legend", {}, label));
    const inputs = Object.entries(options).map(([key, words]) => {
      const id = uniqueId(), input = element("input", {type: "checkbox", ...FRESH, id, value: key});
      input.addEventListener("change", () => ui.change());
      field.append(input, element("label", {for: id}, words));
      return input;
    });
    add(field);
    common.firsts.push(() => inputs.forEach(input => { input.checked = false; }));
    return {get value() { return inputs.filter(input => input.checked).map(input => input.value); }};
  };

  ui.button = (name, label, act, kind) => {
    const button = add(element("button", {type: "button", "data-name": name, class: kind}, label));
    button.addEventListener("click", () => { act(); ui.change(); });
    return {
      button,
      // Gray, but in its place among the tab stops: who pressed it last would lose the focus.
      set idle(off) { button.setAttribute("aria-disabled", off); },
    };
  };

  // All controls as they were first; `act` does the same for what only handles move.
  ui.startAgain = (act = () => {}) => ui.button("reset", "start again", () => {
    common.firsts.forEach(first => first());
    act();
  });

  // A position from `first` to count, to be scrubbed, gone through with buttons, or played, with a
  // step `every` so many milliseconds. `forward(t)` is called when a step to t has been drawn.
  ui.steps = (name, {label, first = 0, count, value = first, show = String, every = 1200, forward = () => {}}) => {
    const line = ui.row("explorable-steps");
    const go = to => { slider.value = Math.max(first, Math.min(count, to)); };
    const step = () => {
      if (slider.value === count) return;
      go(slider.value + 1);
      ui.onceDrawn(() => forward(slider.value));
    };
    let timer;
    const pause = () => { clearInterval(timer); timer = undefined; tellPlay(); };
    const play = line.button(`${name}-play`, "", () => {
      if (timer) return pause();
      if (slider.value === count) go(first); else step();
      if (slider.value < count) timer = setInterval(() => {
        step();
        if (slider.value === count) pause();
        ui.change();
      }, every);
      tellPlay();
    }, "explorable-play");
    const tellPlay = () => {
      play.button.textContent = timer ? "❚❚ pause" : "▶ play";
      play.button.ariaLabel = timer ? "pause" : "play";
    };
    tellPlay();
    for (const touch of ["pointerdown", "keydown", "input"])  // of anything else pauses it
      common.root.addEventListener(touch, ({target, key}) => {
        if (timer && !play.button.contains(target) && key !== "Tab") pause();
      });
    const back = line.button(`${name}-back`, "◀ back", () => go(slider.value - 1));
    const next = line.button(`${name}-next`, "step ▶", step);
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
  // not shown where heads is false. Numbers from min to max are taken, with at most `digits` after
  // the point, and `step` is for the arrow keys. Where something else is typed, the number that stood
  // there before counts, and comes back.
  ui.numbers = (name, {
    label, rows, columns, values, min = -99, max = 99, step = 1, digits = 20, heads = true,
  }) => {
    const range = `${number(min)} to ${number(max)}`;
    const table = element("table", {class: "explorable-numbers", "data-name": name});
    table.append(element("caption", {}, `${label} (${range})`));
    const note = element("p", {class: "explorable-note"});
    const state = values.map(row => [...row]);
    const field = (i, j) => {
      const input = element("input", {  // type=number drops the comma of 1,5 and would take it for 15
        type: "text", role: "spinbutton", ...FRESH, "aria-valuemin": min, "aria-valuemax": max,
        "aria-label": `${label}, ${rows ? rows[i] : ""} ${columns ? columns[j] : j + 1}`,
      });
      let before;
      const write = x => {
        state[i][j] = before = x;
        input.value = x;
        make(input, {"aria-invalid": "false", "aria-valuenow": x});
      };
      const good = x => x >= min && x <= max && Number(x.toFixed(digits)) === x;
      input.addEventListener("input", () => {
        const x = typed(input.value), taken = good(x);
        state[i][j] = taken ? x : before;
        make(input, {"aria-invalid": String(!taken), "aria-valuenow": state[i][j]});
        note.textContent = "";
        ui.change();
      });
      const leave = () => {
        if (input.getAttribute("aria-invalid") === "true") {
          const few = digits < 20 ? ` with at most ${several(digits, "digit")} after the point` : "";
          note.textContent = `“${input.value}” is no number from ${range}${few}: ${number(before, decimals(before))} stays.`;
          ui.tell(note.textContent);
        }
        write(state[i][j]);
      };
      input.addEventListener("blur", leave);
      input.addEventListener("keydown", event => {
        const way = {ArrowUp: step, ArrowDown: -step}[event.key];
        if (event.key === "Enter") leave();
        if (!way) return;
        event.preventDefault();
        const x = Number((state[i][j] + way).toFixed(6));
        if (good(x)) { note.textContent = ""; write(x); ui.change(); }
      });
      write(values[i][j]);
      return {input, write};
    };
    const fields = state.map((row, i) => {
      const line = element("tr"), inLine = row.map((_, j) => field(i, j));
      if (rows && heads) line.append(element("th", {scope: "row"}, rows[i]));
      line.append(...inLine.map(({input}) => element("td", {}, input)));
      table.append(line);
      return inLine;
    });
    add(table);
    table.after(note);
    const control = {
      get value() { return state.map(row => [...row]); },
      set value(next) { next.forEach((row, i) => row.forEach((x, j) => fields[i][j].write(x))); },
    };
    common.firsts.push(() => { control.value = values; note.textContent = ""; });
    return control;
  };

  // One number, large, and what it is a number of.
  ui.big = name => {
    const box = add(element("p", {class: "explorable-big"}));
    const output = element("output", {"data-name": name, ...QUIET}), words = element("span");
    box.append(output, words);
    return {show(x, what) { output.textContent = x; words.textContent = what; }};
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
      table,
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
    const handles = [], knobs = [];
    ui.redraw(repaint);
    new ResizeObserver(() => { if (Math.floor(holder.clientWidth) !== width) repaint(); }).observe(holder);
    return {
      svg,
      // A point that is dragged by mouse or finger, or moved by the arrow keys. `position()` is where
      // it stands as [x, y] in its own units, from -reach to reach, `move(x, y)` is told where it goes;
      // `toPixels` and `fromPixels` translate: (x, y, width) => [x, y], and `snap` puts a dragged point
      // on the grid of `step`. There is no role for a slider in two directions; that of one in one
      // direction makes a screen reader pass the arrow keys on.
      handle(key, {label, position, move, reach, toPixels, fromPixels, snap, step, color = "blue"}) {
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
          move(...snap(...fromPixels(event.clientX - box.left, event.clientY - box.top, width)));
          ui.change();
        };
        const raise = () => knobs.forEach(other => { other.knob.style.zIndex = other.knob === knob ? 1 : 0; });
        const grab = pointer => {
          raise();
          knob.focus({preventScroll: true});
          knob.setPointerCapture(pointer);
          knob.addEventListener("pointermove", follow);
        };
        knobs.push({knob, grab});
        // Knobs may cover each other: the one whose center is nearest is meant. Of two in one place it
        // is the one on top, which moved last.
        knob.addEventListener("pointerdown", event => {
          if (event.button) return;  // a menu may keep the end of such a drag to itself
          const away = one => {
            const {x, y, width} = one.knob.getBoundingClientRect();
            return Math.hypot(x + width / 2 - event.clientX, y + width / 2 - event.clientY) - (one.knob === knob ? 0.5 : 0);
          };
          knobs.reduce((nearest, one) => (away(one) < away(nearest) ? one : nearest)).grab(event.pointerId);
        });
        knob.addEventListener("mousedown", event => event.preventDefault());  // would focus this one
        knob.addEventListener("lostpointercapture", () => knob.removeEventListener("pointermove", follow));
        // To the next line of the grid, in one direction: the other entry stays as it is.
        const next = (x, way) => {
          if (!way) return x;
          const line = way > 0 ? Math.floor(x / step + 1 + 1e-9) : Math.ceil(x / step - 1 - 1e-9);
          return Math.max(-reach, Math.min(reach, line * step));
        };
        knob.addEventListener("keydown", event => {
          const way = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}[event.key];
          if (!way) return;
          event.preventDefault();
          raise();
          move(...position().map((x, axis) => next(x, way[axis])));
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

// The same, but never 0 where it is not: 4.0e−4.
const small = x => (x && Math.abs(x) < 0.005 ? scientific(x, 1) : brief(x));

// With all its digits; and what a reader typed, or NaN. A comma may stand for the point.
const decimals = x => String(x).split(".")[1]?.length ?? 0;
const typed = text => {
  const plain = text.trim().replace("−", "-").replace(",", ".");
  return /^[-+]?(\d+\.?\d*|\.\d+)$/.test(plain) ? Number(plain) : NaN;
};

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
    // The names of all vectors, each at its tip, where it covers no knob and no other name: of the
    // places around the tip the best one, beyond it if that is free.
    names: (vectors, width) => {
      const tips = vectors.map(({at: [x, y]}) => toPixels(x, y, width)), taken = [];
      return vectors.map(({at: [x, y], words, color}, i) => {
        const half = 4.5 * words.length, beyond = Math.hypot(x, y) ? Math.atan2(y, x) : Math.PI / 2;
        const places = [16, 35, 54].flatMap(far => [0, 1, -1, 2, -2, 3, -3, 4].map(turn => {
          const angle = beyond + turn * Math.PI / 4, [left, top] = tips[i];
          return {
            x: left + Math.cos(angle) * (far + half * Math.abs(Math.cos(angle))), y: top - Math.sin(angle) * far,
            cost: Math.abs(turn) + far,
          };
        }));
        const cost = ({x, y, cost}) => {
          const over = (left, top, wide, tall) => Math.abs(x - left) < half + wide && Math.abs(y - top) < 8 + tall;
          const outside = x < half + 1 || x > width - half - 1 || y < 9 || y > size(width) - 9;
          return cost + 1e4 * outside + 300 * taken.filter(other => over(other.x, other.y, other.half, 8)).length
            + 100 * tips.some(([left, top]) => over(left, top, 7, 7));
        };
        const best = places.reduce((best, one) => (cost(one) < cost(best) ? one : best));
        taken.push({...best, half});
        return ["text", {x: best.x, y: best.y + 5, class: `middle bold halo ${color}`}, words];
      });
    },
  };
};

// A matrix as cells with their numbers, from its upper left corner on; a number too long for its cell
// is squeezed. The cells together are a group of the name `name`, the numbers go by name-row-column.
const cells = (matrix, {x, y, cell, height, color, text, name}) => [
  ["rect", {x, y, width: matrix[0].length * cell, height: matrix.length * height, class: "outline", "data-name": name}],
  ...matrix.flatMap((row, i) => row.flatMap((one, j) => {
    const at = {x: x + j * cell, y: y + i * height}, words = text(one);
    const squeezed = words.length * 7.7 > cell - 2 ? {textLength: cell - 4, lengthAdjust: "spacingAndGlyphs"} : {};
    return [
      ["rect", {...at, width: cell, height, class: `pale ${color}`}],
      ["text", {x: at.x + cell / 2, y: at.y + height / 2 + 4, class: "middle small", "data-name": `${name}-${i}-${j}`, ...squeezed}, words],
    ];
  })),
];

// As many digits after the point, up to two, as there is room for in a cell.
const fit = x => [2, 1, 0].map(digits => brief(x, digits)).find(text => text.length <= 6) ?? scientific(x, 1);

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
