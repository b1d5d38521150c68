package gemma4.mtp.app;

import java.io.File;

/** Why the last thing came to nothing. detail: the sentence; of UNEXPECTED, what a developer needs. */
public final class Failure {
    public enum Problem { SENTENCE, DOES_NOT_FIT, OUT_OF_MEMORY, UNEXPECTED }

    public final Problem kind;
    public final String detail;
    /** What was to be loaded, or null. */
    public final File bundle;

    Failure(Problem kind, String detail, File bundle) {
        this.kind = kind;
        this.detail = detail;
        this.bundle = bundle;
    }
}
