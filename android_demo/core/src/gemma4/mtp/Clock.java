package gemma4.mtp;

/** Seconds from any beginning. */
public interface Clock {
    Clock SYSTEM = new Clock() {
        @Override
        public double seconds() {
            return System.nanoTime() * 1e-9;
        }
    };

    double seconds();
}
