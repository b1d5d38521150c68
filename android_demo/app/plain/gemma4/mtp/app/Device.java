package gemma4.mtp.app;

import gemma4.mtp.Pair;

/** What the machine gives. */
public interface Device {
    /** Graphs of one bundle. */
    interface Graphs extends Pair.GraphLoader {
        /** Of the process, whatever was asked for. */
        int threads();

        void close();
    }

    Graphs graphs(int threads);

    /** That could be had without pushing other programs out. */
    long availableBytes();

    /** That this app's own buffers may still take. */
    long heapBytes();

    /** What the process has; 0 where the system does not tell. */
    long residentBytes();
}
