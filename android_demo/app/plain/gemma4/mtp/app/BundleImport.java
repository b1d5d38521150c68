package gemma4.mtp.app;

import gemma4.mtp.Manifest;
import gemma4.mtp.Memory;
import gemma4.mtp.Pair;
import gemma4.mtp.Specs.FileSpec;
import gemma4.mtp.ValueError;
import java.io.File;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.math.BigInteger;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.List;

/**
 * A bundle from elsewhere, copied into a folder of bundles. It gets its name when every file has been verified, so that
 * what was cut short is never taken for one.
 */
public final class BundleImport {
    /** Names of the folder that is being filled, and of a bundle whose place another one takes. */
    static final String UNFINISHED = ".import";
    static final String REPLACED = ".replaced";
    private static final int MOST_CHARACTERS = 100; // of a name
    private static final long SPARE_BYTES = 64 << 20; // a full disk harms other apps too
    private static final long MANIFEST_LIMIT = 16 << 20;

    /** Where files come from. */
    public interface Source {
        /** path: as in the manifest, "onnx/drafter.onnx". Null if there is no such file. */
        InputStream open(String path) throws IOException;
    }

    public interface Progress {
        /** Bytes done and in all, now and then. False to give up. */
        boolean at(String file, long done, long total);
    }

    private final Source source;
    private final File folder;
    private final Progress progress;
    private final byte[] block = new byte[1 << 20];
    private long done;
    private long total;

    private BundleImport(Source source, File folder, Progress progress) {
        this.source = source;
        this.folder = folder;
        this.progress = progress;
    }

    /**
     * The bundle's folder in root; one of the same name is replaced. Null if progress gave up. ValueError if a file is
     * missing or corrupt, or if there is no room. Nothing is left of what failed.
     */
    public static File run(Source source, File root, Progress progress) {
        File folder = new File(root, UNFINISHED);
        if (!Bundles.delete(folder) || !folder.mkdirs()) {
            throw new ValueError(folder + ": cannot be written; make room, or restart the device");
        }
        try {
            BundleImport work = new BundleImport(source, folder, progress);
            if (!work.copy(Manifest.NAME, null)) {
                return null;
            }
            Manifest manifest = Manifest.load(folder);
            Pair.backend(manifest); // before gigabytes are copied in vain
            return work.copyFiles(manifest, root.getUsableSpace()) ? work.finish(manifest, root) : null;
        } catch (IOException error) {
            throw new ValueError("the bundle cannot be copied: " + error.getMessage());
        } finally {
            Bundles.delete(folder);
        }
    }

    /** What an import that was killed has left in root. */
    static List<File> remains(File root) {
        return Arrays.asList(new File(root, UNFINISHED), new File(root, REPLACED));
    }

    private boolean copyFiles(Manifest manifest, long free) throws IOException {
        List<String> files = Bundles.files(manifest);
        for (String file : files) {
            total += manifest.files.get(file).sizeBytes;
        }
        checkSpace(total, free);
        for (String file : files) {
            if (!copy(file, manifest.files.get(file))) {
                return false;
            }
        }
        return true;
    }

    static void checkSpace(long total, long free) {
        if (total > free - SPARE_BYTES) {
            throw new ValueError("the bundle takes " + Memory.megabytes(total) + ", and "
                + Memory.megabytes(Math.max(0, free - SPARE_BYTES)) + " are free; make room and import it again");
        }
    }

    /** spec null: the manifest itself, of which nothing is known before. False if progress gave up. */
    private boolean copy(String file, FileSpec spec) throws IOException {
        File target = new File(folder, file);
        if (!target.getParentFile().isDirectory() && !target.getParentFile().mkdirs()) {
            throw new IOException(target.getParent() + " cannot be made");
        }
        MessageDigest digest = sha256();
        long size = 0;
        try (InputStream in = source.open(file)) {
            if (in == null) {
                throw new ValueError(file + ": is not in the folder; choose the folder that an export wrote");
            }
            try (OutputStream out = new FileOutputStream(target)) {
                for (int n = in.read(block); n >= 0; n = in.read(block)) {
                    size += n;
                    if (size > (spec == null ? MANIFEST_LIMIT : spec.sizeBytes)) {
                        break;
                    }
                    out.write(block, 0, n);
                    digest.update(block, 0, n);
                    done += spec == null ? 0 : n;
                    if (!progress.at(file, done, total)) {
                        return false;
                    }
                }
            }
        }
        if (spec != null) {
            check(file, spec, size, String.format("%064x", new BigInteger(1, digest.digest())));
        } else if (size > MANIFEST_LIMIT) {
            throw new ValueError(file + ": has more than " + MANIFEST_LIMIT + " bytes; export the bundle again");
        }
        return true;
    }

    private static void check(String file, FileSpec spec, long size, String sha256) {
        if (size != spec.sizeBytes) {
            String found = size > spec.sizeBytes ? "more" : size + " bytes, fewer";
            throw new ValueError(file + ": has " + found + " than the " + spec.sizeBytes
                + " that the manifest says; copy or export the bundle again");
        }
        if (!sha256.equals(spec.sha256)) {
            throw new ValueError(file + ": sha256 is " + sha256 + ", the manifest says " + spec.sha256
                + "; the file is corrupt, copy or export the bundle again");
        }
    }

    private static MessageDigest sha256() {
        try {
            return MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error); // every Java has it
        }
    }

    private File finish(Manifest manifest, File root) throws IOException {
        File target = new File(root, name(manifest));
        File replaced = new File(root, REPLACED);
        if (!Bundles.delete(replaced) || (target.exists() && !target.renameTo(replaced)) || !folder.renameTo(target)) {
            replaced.renameTo(target); // the one that was there
            throw new IOException(target + " cannot be written");
        }
        Bundles.delete(replaced);
        return target;
    }

    /** Of name and recipe, "e2b-int8", without what a file system may not take. */
    static String name(Manifest manifest) {
        String recipe = Pair.backend(manifest).quantization.recipe;
        String name = (manifest.name + "-" + recipe).replaceAll("[^A-Za-z0-9_-]+", "-").replaceAll("^-+|-+$", "");
        return name.isEmpty() ? "bundle" : name.substring(0, Math.min(name.length(), MOST_CHARACTERS));
    }
}
