package gemma4.mtp.app;

import android.app.Activity;
import android.app.AlertDialog;
import android.content.DialogInterface;
import android.content.Intent;
import android.net.Uri;
import android.os.Bundle;
import android.view.Menu;
import android.view.MenuItem;
import android.view.View;
import android.widget.Button;
import android.widget.EditText;
import android.widget.ScrollView;
import android.widget.TextView;
import java.io.File;
import java.util.List;

/** A conversation, or a raw prompt where the bundle has no chat; answers are streamed and can be stopped. */
public final class ChatActivity extends Activity implements Engine.Screen {
    private static final int PICK_FOLDER = 1;

    private Engine engine;
    private TextView transcript;
    private TextView status;
    private ScrollView scroll;
    private EditText message;
    private Button send;

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        setContentView(R.layout.chat);
        engine = ((App) getApplication()).engine();
        transcript = (TextView) findViewById(R.id.transcript);
        status = (TextView) findViewById(R.id.status);
        scroll = (ScrollView) findViewById(R.id.scroll);
        message = (EditText) findViewById(R.id.message);
        send = (Button) findViewById(R.id.send);
        send.setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                sendOrStop();
            }
        });
    }

    @Override
    protected void onResume() {
        super.onResume();
        engine.show(this);
        if (!engine.loaded() && !engine.busy()) {
            loadLast();
        }
        ready();
    }

    @Override
    protected void onDestroy() {
        if (isFinishing()) {
            engine.show(null);
            engine.close();
        }
        super.onDestroy();
    }

    private void loadLast() {
        File last = new File(((App) getApplication()).settings().bundle());
        List<File> bundles = Bundles.list(this);
        if (bundles.contains(last)) {
            engine.load(last);
        } else if (bundles.size() == 1) {
            engine.load(bundles.get(0));
        } else {
            status(getString(R.string.no_bundle, Bundles.folder(this).getPath()));
        }
    }

    private void sendOrStop() {
        if (engine.busy()) {
            engine.stop();
            return;
        }
        String text = message.getText().toString();
        if (text.trim().isEmpty()) {
            return;
        }
        message.setText("");
        if (engine.chats()) {
            String before = transcript.length() == 0 ? "" : "\n\n";
            text(before + getString(R.string.you) + ": " + text.trim() + "\n\n" + getString(R.string.model) + ": ");
        } else {
            transcript.setText(text);
        }
        engine.send(text);
        ready();
    }

    @Override
    public boolean onCreateOptionsMenu(Menu menu) {
        getMenuInflater().inflate(R.menu.chat, menu);
        return true;
    }

    @Override
    public boolean onOptionsItemSelected(MenuItem item) {
        int id = item.getItemId();
        if (id == R.id.settings) {
            startActivity(new Intent(this, SettingsActivity.class));
        } else if (engine.busy()) {
            status(getString(R.string.busy));
        } else if (id == R.id.new_chat) {
            transcript.setText("");
            engine.newChat();
        } else if (id == R.id.choose_bundle) {
            chooseBundle();
        } else if (id == R.id.import_bundle) {
            startActivityForResult(new Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), PICK_FOLDER);
        } else if (id == R.id.benchmark) {
            startActivity(new Intent(this, BenchmarkActivity.class));
        }
        return true;
    }

    private void chooseBundle() {
        final List<File> bundles = Bundles.list(this);
        if (bundles.isEmpty()) {
            status(getString(R.string.no_bundle, Bundles.folder(this).getPath()));
            return;
        }
        String[] names = new String[bundles.size()];
        for (int i = 0; i < names.length; i++) {
            names[i] = bundles.get(i).getName();
        }
        new AlertDialog.Builder(this)
            .setTitle(R.string.choose_bundle)
            .setItems(names,
                new DialogInterface.OnClickListener() {
                    @Override
                    public void onClick(DialogInterface dialog, int which) {
                        transcript.setText("");
                        engine.load(bundles.get(which));
                        ready();
                    }
                })
            .show();
    }

    @Override
    protected void onActivityResult(int request, int result, Intent data) {
        super.onActivityResult(request, result, data);
        if (request != PICK_FOLDER || result != RESULT_OK || data == null || data.getData() == null) {
            return;
        }
        final Uri tree = data.getData();
        engine.run(new Engine.Work() {
            @Override
            public void run() {
                File imported = Bundles.importTree(getApplicationContext(), tree, new Bundles.Progress() {
                    @Override
                    public void line(String text) {
                        engine.status(text);
                    }
                });
                engine.status(getString(R.string.imported, imported.getName()));
            }
        });
        ready();
    }

    @Override
    public void status(String line) {
        status.setText(line);
    }

    @Override
    public void text(String piece) {
        transcript.append(piece);
        scroll.post(new Runnable() {
            @Override
            public void run() {
                scroll.fullScroll(View.FOCUS_DOWN);
            }
        });
    }

    @Override
    public void ready() {
        boolean busy = engine.busy();
        send.setText(busy ? R.string.stop : R.string.send);
        send.setEnabled(busy || engine.loaded());
        message.setHint(engine.loaded() && !engine.chats() ? R.string.prompt_hint : R.string.message_hint);
    }
}
