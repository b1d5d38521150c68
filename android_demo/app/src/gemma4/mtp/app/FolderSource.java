package gemma4.mtp.app;

import android.content.ContentResolver;
import android.database.Cursor;
import android.net.Uri;
import android.provider.DocumentsContract;
import android.provider.DocumentsContract.Document;
import java.io.IOException;
import java.io.InputStream;
import java.util.HashMap;
import java.util.Map;

/** Files of a folder that the user picked. */
final class FolderSource implements BundleImport.Source {
    private final ContentResolver resolver;
    private final Uri tree;
    private final Map<String, String> ids = new HashMap<>(); // path of a file or folder -> its document id
    private final Map<String, Boolean> listed = new HashMap<>();

    FolderSource(ContentResolver resolver, Uri tree) {
        this.resolver = resolver;
        this.tree = tree;
    }

    @Override
    public InputStream open(String path) throws IOException {
        try {
            String id = id(path);
            return id == null ? null : resolver.openInputStream(DocumentsContract.buildDocumentUriUsingTree(tree, id));
        } catch (RuntimeException error) { // a provider's own: no permission any more, a card that was taken out
            throw new IOException(path + " cannot be read: " + error.getMessage(), error);
        }
    }

    private String id(String path) {
        if (path.isEmpty()) {
            return DocumentsContract.getTreeDocumentId(tree);
        }
        int slash = path.lastIndexOf('/');
        String folder = slash < 0 ? "" : path.substring(0, slash);
        if (!listed.containsKey(folder)) {
            listed.put(folder, true);
            String parent = id(folder);
            if (parent != null) {
                list(folder, parent);
            }
        }
        return ids.get(path);
    }

    private void list(String folder, String id) {
        Uri children = DocumentsContract.buildChildDocumentsUriUsingTree(tree, id);
        String[] columns = {Document.COLUMN_DISPLAY_NAME, Document.COLUMN_DOCUMENT_ID};
        try (Cursor cursor = resolver.query(children, columns, null, null, null)) {
            while (cursor != null && cursor.moveToNext()) {
                String name = cursor.getString(0);
                ids.put(folder.isEmpty() ? name : folder + "/" + name, cursor.getString(1));
            }
        }
    }
}
