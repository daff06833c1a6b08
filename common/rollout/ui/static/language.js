// In the locale C, Chromium's navigator.language is "en-US@posix". Intl refuses it, and uplot.js needs Intl to load.
try { new Intl.NumberFormat(navigator.language) } catch { Object.defineProperty(navigator, "language", { value: "en-US" }) }
