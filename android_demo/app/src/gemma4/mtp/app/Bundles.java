package gemma4.mtp.app;

import android.content.ContentResolver;
import android.content.Context;
import android.database.Cursor;
import android.net.Uri;
import android.provider.DocumentsContract;
import gemma4.mtp.Manifest;
import gemma4.mtp.ValueError;
import java.io.File;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Bundle folders: those in the app's own folders, and one that the user picks, which is copied and verified. */
final class Bundles {
    private static final String PART = ".part"; // of the name of a folder that is being copied
    private static final long SPARE_BYTES = 64L << 20;

    /** Tells how far a copy is. */
    interface Progress {
        void line(String text);
    }

    private Bundles() {}

    /** Where `adb push` puts a bundle, and where imports go. */
    static File folder(Context context) {
        File external = context.getExternalFilesDir("bundles");
        return external != null ? external : new File(context.getFilesDir(), "bundles");
    }

    /** The bundles that are there; a folder without a manifest is none. */
    static List<File> list(Context context) {
        List<File> found = new ArrayList<>();
        File[] entries = folder(context).listFiles();
        for (File entry : entries == null ? new File[0] : entries) {
            if (new File(entry, Manifest.NAME).isFile() && !entry.getName().endsWith(PART)) {
                found.add(entry);
            }
        }
        return found;
    }

    /**
     * Copy the folder that the user picked, manifest last, and verify every hash. ValueError says what went wrong;
     * then nothing of it is left.
     */
    static File importTree(Context context, Uri tree, Progress progress) {
        Map<String, Source> sources = new LinkedHashMap<>();
        String root = DocumentsContract.getTreeDocumentId(tree);
        addChildren(context, tree, root, "", sources);
        if (!sources.containsKey(Manifest.NAME)) {
            throw new ValueError(context.getString(R.string.not_readable, Manifest.NAME));
        }
        String name = root.replaceAll(".*[:/]", "").replaceAll("[^A-Za-z0-9._-]", "_");
        File target = new File(folder(context), name.isEmpty() ? "bundle" : name);
        File part = new File(target.getPath() + PART);
        delete(part);
        try {
            checkSpace(context, sources);
            copyAll(context, sources, part, progress);
            Manifest manifest = Manifest.load(part);
            for (String file : manifest.files.keySet()) {
                progress.line(context.getString(R.string.verifying, file));
                List<String> one = new ArrayList<>();
                one.add(file);
                manifest.checkHashes(part, one);
            }
            delete(target);
            if (!part.renameTo(target)) {
                throw new ValueError(context.getString(R.string.failed, target.getPath()));
            }
        } catch (IOException | RuntimeException error) {
            delete(part);
            String said = String.valueOf(error.getMessage());
            throw error instanceof ValueError ? (ValueError) error
                                              : new ValueError(context.getString(R.string.failed, said));
        }
        return target;
    }

    private static final class Source {
        private final Uri uri;
        private final long bytes;

        private Source(Uri uri, long bytes) {
            this.uri = uri;
            this.bytes = bytes;
        }
    }

    private static void addChildren(Context context, Uri tree, String parent, String path, Map<String, Source> found) {
        Uri children = DocumentsContract.buildChildDocumentsUriUsingTree(tree, parent);
        String[] columns = {DocumentsContract.Document.COLUMN_DOCUMENT_ID,
            DocumentsContract.Document.COLUMN_DISPLAY_NAME, DocumentsContract.Document.COLUMN_MIME_TYPE,
            DocumentsContract.Document.COLUMN_SIZE};
        try (Cursor cursor = context.getContentResolver().query(children, columns, null, null, null)) {
            while (cursor != null && cursor.moveToNext()) {
                String name = path + cursor.getString(1);
                if (DocumentsContract.Document.MIME_TYPE_DIR.equals(cursor.getString(2))) {
                    addChildren(context, tree, cursor.getString(0), name + "/", found);
                } else if (!name.startsWith("cache/") && !name.startsWith("executorch/") && !name.contains("..")) {
                    Uri uri = DocumentsContract.buildDocumentUriUsingTree(tree, cursor.getString(0));
                    found.put(name, new Source(uri, cursor.getLong(3)));
                }
            }
        }
    }

    private static long total(Map<String, Source> sources) {
        long total = 0;
        for (Source source : sources.values()) {
            total += source.bytes;
        }
        return total;
    }

    private static void checkSpace(Context context, Map<String, Source> sources) {
        long free = folder(context).getUsableSpace();
        if (total(sources) + SPARE_BYTES > free) {
            throw new ValueError(context.getString(R.string.no_space, total(sources) / 1000000, free / 1000000));
        }
    }

    private static void copyAll(Context context, Map<String, Source> sources, File part, Progress progress)
        throws IOException {
        long total = total(sources);
        long done = 0;
        byte[] block = new byte[1 << 20];
        ContentResolver resolver = context.getContentResolver();
        for (Map.Entry<String, Source> entry : sources.entrySet()) {
            File file = new File(part, entry.getKey());
            if (!file.getParentFile().isDirectory() && !file.getParentFile().mkdirs()) {
                throw new IOException(file.getParent());
            }
            try (InputStream in = resolver.openInputStream(entry.getValue().uri);
                OutputStream out = new FileOutputStream(file)) {
                for (int n = in.read(block); n > 0; n = in.read(block)) {
                    out.write(block, 0, n);
                    done += n;
                    progress.line(context.getString(R.string.copying, entry.getKey(), done / 1000000, total / 1000000));
                }
            }
        }
    }

    private static void delete(File path) {
        File[] children = path.listFiles();
        for (File child : children == null ? new File[0] : children) {
            delete(child);
        }
        path.delete();
    }
}
