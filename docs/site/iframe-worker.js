"use strict";
// The search of pages that are opened from a folder: a browser starts no worker there, so that a
// hidden frame runs its script. Nothing is fetched from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><title>Search</title><body>");
      inside.document.close();
      const load = (address) => new Promise((loaded, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: address, onload: loaded, onerror: failed });
        inside.document.body.append(script);
      });
      inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inside.importScripts = (...all) => all.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      load(String(url)).then(() => {
        this.postMessage = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
        this.waiting.forEach((data) => this.postMessage(data));
      });
    }
    postMessage(data) { this.waiting.push(data); }
    terminate() { this.frame.remove(); }
  };
}
