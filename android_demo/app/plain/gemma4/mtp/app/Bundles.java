package gemma4.mtp.app;

import gemma4.mtp.Manifest;
import gemma4.mtp.Pair;
import gemma4.mtp.Specs.GraphSpec;
import java.io.File;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/** The bundle folders that an app has. */
public final class Bundles {
    private Bundles() {}

    /** Folders with a manifest, by name; those that begin with a dot are not finished. */
    public static List<File> in(File... roots) {
        List<File> found = new ArrayList<>();
        for (File root : roots) {
            File[] entries = root == null ? null : root.listFiles();
            if (entries == null) {
                continue;
            }
            Arrays.sort(entries);
            for (File entry : entries) {
                if (!entry.getName().startsWith(".") && new File(entry, Manifest.NAME).isFile()) {
                    found.add(entry);
                }
            }
        }
        return found;
    }

    /** What this app reads of a bundle: all but the graphs of other backends. */
    public static List<String> files(Manifest manifest) {
        List<String> files = new ArrayList<>(manifest.files.keySet());
        for (GraphSpec graph : manifest.graphs.values()) {
            for (String backend : graph.files.keySet()) {
                if (!backend.equals(Pair.BACKEND)) {
                    files.remove(graph.files.get(backend));
                    files.remove(graph.files.get(backend) + ".data");
                }
            }
        }
        return files;
    }

    /** Of all files in it. */
    public static long sizeBytes(File path) {
        File[] children = path.listFiles();
        long size = children == null ? path.length() : 0;
        for (File child : children == null ? new File[0] : children) {
            size += sizeBytes(child);
        }
        return size;
    }

    /** With all that is in it; false if something stays. */
    public static boolean delete(File path) {
        File[] children = path.listFiles();
        boolean gone = true;
        if (children != null) {
            for (File child : children) {
                gone &= delete(child);
            }
        }
        return gone & (path.delete() || !path.exists());
    }
}
