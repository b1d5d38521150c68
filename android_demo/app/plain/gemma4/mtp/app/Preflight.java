package gemma4.mtp.app;

import gemma4.mtp.Memory;
import gemma4.mtp.ValueError;

/** Whether a bundle fits into this device, with the numbers. */
final class Preflight {
    /** The device may page what does not fit, slowly, so a user may load it all the same. */
    static final class Refused extends RuntimeException {
        private static final long serialVersionUID = 1;

        Refused(String message) {
            super(message);
        }
    }

    private Preflight() {}

    /** ValueError where no device could: the app's own buffers, which hold the KV rows, have a limit of their own. */
    static void checkHeap(long kvBytes, long heapBytes, int contextTokens) {
        if (kvBytes > heapBytes) {
            throw new ValueError("KV rows of " + contextTokens + " tokens take " + Memory.megabytes(kvBytes)
                + ", and an app may have " + Memory.megabytes(heapBytes) + " here; set a smaller context");
        }
    }

    static void checkFits(Memory need, long availableBytes) {
        if (need.totalBytes() > availableBytes) {
            throw new Refused(need.describe() + " against " + Memory.megabytes(availableBytes)
                + " available; close other apps, or set a smaller context");
        }
    }
}
