// The lists of links beside an equation close by Escape, and by a click elsewhere.
const openLists = () => document.querySelectorAll(".eq-links details[open]");
document.addEventListener("click", ({target}) => {
  for (const list of openLists()) if (!list.contains(target)) list.open = false;
});
document.addEventListener("keydown", ({key}) => {
  if (key !== "Escape") return;
  for (const list of openLists()) {
    if (list.contains(document.activeElement)) list.firstElementChild.focus();
    list.open = false;
  }
});

// The table of all equations can be searched. Without a script it is simply long.
document.addEventListener("DOMContentLoaded", () => {
  const index = document.querySelector(".equation-index");
  if (!index) return;
  const form = document.createElement("div");
  form.className = "equation-filter";
  form.innerHTML = `<label for="equation-filter">Find</label>
    <input id="equation-filter" type="search" placeholder="delta, 7.4, wkv, chunkwise">
    <output aria-live="polite"></output>`;
  index.querySelector("h1 ~ p").after(form);
  const [input, count] = form.querySelectorAll("input, output");
  const rows = [...index.querySelectorAll("tbody tr")];
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(word => word);
    let shown = 0;
    for (const row of rows) {
      const section = row.closest("section").querySelector("h2").textContent;
      const text = `${section} ${row.textContent}`.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    for (const section of index.querySelectorAll("section section"))
      section.hidden = !section.querySelector("tbody tr:not([hidden])");
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  };
  input.addEventListener("input", show);
});
