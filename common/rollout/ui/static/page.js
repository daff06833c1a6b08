"use strict";
// Charts of <figure data-chart>, and the page's stream: sections that changed, by id.
(() => {
  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--dim"), line: of("--line"), series: [of("--accent"), of("--bad"), of("--good"), of("--warn")] };
  };

  const drawn = new WeakMap();

  function draw(figure) {
    const text = figure.dataset.chart;
    const before = drawn.get(figure);
    const width = Math.max(240, figure.clientWidth);
    if (before && before.text === text && before.width === width) return;
    const { x, names, of, columns } = JSON.parse(text);
    const kind = JSON.stringify([names, of]);
    if (before && before.width === width && before.kind === kind) {
      before.plot.setData(columns);
      before.text = text;
      return;
    }
    if (before) before.plot.root.remove();
    const look = colours();
    const axis = { stroke: look.text, grid: { stroke: look.line, width: 1 }, ticks: { stroke: look.line } };
    const series = names.map((label, n) => ({
      label, stroke: look.series[of[n] % look.series.length], width: 1.5, spanGaps: true, dash: of[n] === n ? [] : [4, 4],
      points: { show: columns[0].length < 50 },
    }));
    const options = {
      width, height: 220, scales: { x: { time: false } }, axes: [{ ...axis, label: x, labelSize: 20 }, { ...axis, size: 70 }],
      series: [{ label: x }, ...series], legend: { show: names.length > 1, live: false },
    };
    const plot = new uPlot(options, columns, figure);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", names.join(", ") + " by " + x);
    drawn.set(figure, { plot, text, width, kind });
  }

  const drawAll = () => document.querySelectorAll("figure[data-chart]").forEach(draw);

  function forget() {
    document.querySelectorAll("figure[data-chart]").forEach((figure) => {
      const before = drawn.get(figure);
      if (before) before.plot.root.remove();
      drawn.delete(figure);
    });
    drawAll();
  }

  const callbacks = {
    // What the script drew, and what a person opened, stays.
    beforeNodeRemoved: (node) => !(node.classList && node.classList.contains("uplot")),
    beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS"),
  };

  function update(id, html) {
    const old = document.getElementById(id);
    if (old && old.contains(document.activeElement) && document.activeElement.matches("input, select")) return;
    if (old) Idiomorph.morph(old, html, { morphStyle: "innerHTML", callbacks });
  }

  function arrange(ids) {
    const main = document.getElementById("main");
    for (const section of main.querySelectorAll(":scope > section")) if (!ids.includes(section.id)) section.remove();
    let before = null;
    for (const id of ids) {
      let section = document.getElementById(id);
      if (!section) {
        section = document.createElement("section");
        section.id = id;
        const after = before ? before.nextSibling : main.querySelector(":scope > section");
        main.insertBefore(section, after);
      }
      before = section;
    }
  }

  function tell(text) {
    const place = document.getElementById("trouble");
    if (place && place.textContent !== text) place.textContent = text;
  }

  function listen(address) {
    const source = new EventSource(address);
    source.addEventListener("change", (event) => {
      const { order, sections, trouble } = JSON.parse(event.data);
      arrange(order);
      for (const [id, html] of Object.entries(sections)) update(id, html);
      tell(trouble);
      drawAll();
    });
    source.addEventListener("end", () => source.close());
    source.onerror = () => tell("The page's server does not answer. What is shown may be old.");
  }

  drawAll();
  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
  if (document.body.dataset.stream) listen(document.body.dataset.stream);
})();
