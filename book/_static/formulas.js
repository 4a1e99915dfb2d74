// A page's text is shown with its formulas, not before them: when they arrive, lines break anew and would
// move under the reader's eyes. So those that are in sight are set first. The text waits for them for a
// second at most, and where scripts do not run not at all. The others follow, a few at a time.
if (window.MathJax) {
  const {classList} = document.documentElement;
  const show = () => classList.remove("formulas-to-come");
  classList.add("formulas-to-come");
  setTimeout(show, 1000);

  const set = formulas => {
    const page = MathJax.startup.document;
    page.options.elements = formulas;
    page.reset();
    return MathJax._.mathjax.mathjax.handleRetriesFor(() => page.render());
  };

  const setAll = async () => {
    const formulas = [...document.querySelectorAll(".math")];
    const distance = formulas.map(formula => {
      const {top, bottom} = formula.getBoundingClientRect();
      return Math.max(top - innerHeight, -bottom);
    });
    const inSight = formulas.filter((_, i) => distance[i] < 300);
    await set(inSight);
    show();
    const others = formulas.filter((_, i) => distance[i] >= 300);
    for (let i = 0; i < others.length; i += 50) {
      await new Promise(done => setTimeout(done));
      await set(others.slice(i, i + 50));
    }
  };

  window.MathJax.startup = {...window.MathJax.startup, pageReady: () => setAll().finally(show)};
}
