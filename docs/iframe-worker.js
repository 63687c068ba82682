// Browsers start no workers for pages that were opened from disk. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = [];
    #isLoaded = false;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.#tell(this, data));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.#isLoaded = true;
        this.#waiting.splice(0).forEach((data) => this.#tell(inside, data));
      };
      inside.document.body.append(script);
    }

    postMessage(data) {
      if (this.#isLoaded) this.#tell(this.#frame.contentWindow, data);
      else this.#waiting.push(data);
    }

    terminate() {
      this.#frame.remove();
    }

    #tell(target, data) {
      const event = new MessageEvent("message", { data });
      target.dispatchEvent(event);
      if (target === this) this.onmessage?.(event);
    }
  };
}
