// --- What the tests of the site found in the theme -------------------------------------------

// Without a stored choice the theme reports an error on the console before it falls back to "auto".
document.documentElement.dataset.mode ||= "auto";

// Opened as a file, a page may not read other files, so search results come without their summaries.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// The bibliography calls itself a list, but not its entries items of it.
document.addEventListener("DOMContentLoaded", () => {
  for (const entry of document.querySelectorAll(".citation-list[role=list] > .citation"))
    entry.setAttribute("role", "listitem");
});

// The index of the sources puts lists into lists, beside the items that they belong to.
document.addEventListener("DOMContentLoaded", () => {
  for (const list of document.querySelectorAll("ul > ul")) list.previousElementSibling?.append(list);
});

// Formulas wider than their column scroll, so the keyboard must reach them; the theme sees to the rest.
const reachWideFormulas = () => {
  for (const formula of document.querySelectorAll("div.math, mjx-container[display=true]"))
    if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
    else formula.removeAttribute("tabindex");
};
addEventListener("load", () => window.MathJax?.startup?.promise.then(reachWideFormulas));
addEventListener("resize", reachWideFormulas);

// --- End of what the tests found -------------------------------------------------------------

// Paper is light, whatever the screen is.
let themeOnScreen;
matchMedia("print").addEventListener("change", ({matches}) => {
  const page = document.documentElement.dataset;
  if (matches) themeOnScreen = page.theme;
  page.theme = matches ? "light" : themeOnScreen;
});

// --- Figures that can be touched ---------------------------------------------------------------

// Which file makes which figure explorable; a page loads what its own figures need.
const EXPLORABLES = {
  "fig-two-brackets": "matrix",
  "fig-signal-crosstalk": "memory",
  "fig-plane-weights": "features",
  "fig-three-ways": "decoding",
  "fig-token-weights": "forgetting",
  "fig-four-orders": "scans",
  "fig-two-ways": "two_ways",
  "fig-sums-stick": "sums",
  "fig-recall-overflow": "recall",
};
const explorableFolder = new URL("explorables/", document.currentScript.src);
addEventListener("DOMContentLoaded", () => {
  const files = Object.keys(EXPLORABLES).filter(id => document.getElementById(id)).map(id => EXPLORABLES[id]);
  if (!files.length) return;
  document.head.append(Object.assign(document.createElement("link"), {
    rel: "stylesheet", href: new URL("explorable.css", explorableFolder),
  }));
  for (const name of ["explorable", ...files])
    document.head.append(Object.assign(document.createElement("script"), {
      async: false, src: new URL(`${name}.js`, explorableFolder),  // in this order
    }));
});
