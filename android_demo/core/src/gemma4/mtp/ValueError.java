package gemma4.mtp;

/** What a caller gave cannot be; the message is one sentence with the value and the remedy, fit to be shown. */
public final class ValueError extends RuntimeException {
    private static final long serialVersionUID = 1;

    public ValueError(String message) {
        super(message);
    }
}
