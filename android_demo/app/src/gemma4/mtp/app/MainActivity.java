package gemma4.mtp.app;

import android.app.AlertDialog;
import android.content.DialogInterface;
import android.content.Intent;
import android.os.Bundle;
import android.text.method.ScrollingMovementMethod;
import android.view.Menu;
import android.view.MenuItem;
import android.view.View;
import android.widget.Button;
import android.widget.EditText;
import android.widget.LinearLayout;
import android.widget.ScrollView;
import android.widget.TextView;
import gemma4.mtp.Memory;
import java.io.File;
import java.security.SecureRandom;

/** The conversation. */
public final class MainActivity extends EngineActivity {
    private ScrollView scroll;
    private LinearLayout transcript;
    private TextView figures;
    private EditText message;
    private Button send;
    private Failure asked; // whether to load it all the same
    private boolean opened; // the bundle of the last time has been thought of

    @Override
    int layout() {
        return R.layout.main;
    }

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        scroll = (ScrollView) findViewById(R.id.scroll);
        transcript = (LinearLayout) findViewById(R.id.transcript);
        figures = (TextView) findViewById(R.id.figures);
        message = (EditText) findViewById(R.id.message);
        send = (Button) findViewById(R.id.send);
        ((TextView) findViewById(R.id.note)).setMovementMethod(new ScrollingMovementMethod());
        send.setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                sendOrStop();
            }
        });
    }

    @Override
    protected void onDestroy() {
        if (isFinishing()) { // else a new screen comes for this one, and the bundle stays
            engine().close();
        }
        super.onDestroy();
    }

    private void sendOrStop() {
        if (engine().busy()) {
            engine().stop();
            return;
        }
        String text = message.getText().toString();
        if (!text.trim().isEmpty()) {
            engine().send(text, app().settings(), new SecureRandom().nextLong());
            message.setText("");
        }
    }

    @Override
    public boolean onCreateOptionsMenu(Menu menu) {
        getMenuInflater().inflate(R.menu.main, menu);
        return true;
    }

    @Override
    public boolean onPrepareOptionsMenu(Menu menu) {
        boolean idle = engine().loaded() != null && !engine().busy();
        menu.findItem(R.id.new_chat).setEnabled(idle);
        menu.findItem(R.id.benchmark).setEnabled(idle);
        return true;
    }

    @Override
    public boolean onOptionsItemSelected(MenuItem item) {
        int id = item.getItemId();
        if (id == R.id.new_chat) {
            engine().newChat();
        } else if (id == R.id.bundles) {
            startActivity(new Intent(this, BundlesActivity.class));
        } else if (id == R.id.settings) {
            startActivity(new Intent(this, SettingsActivity.class));
        } else if (id == R.id.benchmark) {
            startActivity(new Intent(this, BenchmarkActivity.class));
        }
        return true;
    }

    @Override
    public void changed() {
        Engine engine = engine();
        Engine.Loaded loaded = engine.loaded();
        boolean idle = loaded != null && !engine.busy();
        send.setText(engine.busy() ? R.string.stop : R.string.send);
        send.setEnabled(engine.busy() || idle);
        message.setEnabled(idle);
        message.setHint(loaded == null || loaded.chats ? R.string.message_hint : R.string.raw_hint);
        transcript.removeAllViews();
        for (Engine.Line line : engine.transcript()) {
            transcript.addView(lineView(line));
        }
        figures();
        note(noteText());
        invalidateOptionsMenu();
        if (loaded != null) {
            app().storeLastBundle(loaded.bundle);
        }
        Failure failure = engine.failure();
        if (failure != null && failure != asked && failure.kind == Failure.Problem.DOES_NOT_FIT) {
            asked = failure;
            askToLoadAnyway(failure);
        }
        scrollDown();
        if (!opened && !engine.busy()) { // what a screen before this one began may still run
            opened = true;
            openLast();
        }
    }

    private void openLast() {
        File last = app().lastBundle();
        boolean nothing = engine().loaded() == null && engine().failure() == null;
        if (nothing && last != null && app().bundles().contains(last)) {
            engine().load(last, app().settings(), false);
        }
    }

    private TextView lineView(Engine.Line line) {
        TextView view = (TextView) getLayoutInflater().inflate(R.layout.line, transcript, false);
        view.setText(line.text);
        if (line.user) {
            view.setBackgroundResource(R.drawable.user);
        }
        return view;
    }

    private String noteText() {
        Engine engine = engine();
        Engine.Loaded loaded = engine.loaded();
        if (failureText() != null) {
            return failureText();
        }
        if (engine.busy()) {
            return engine.transcript().isEmpty() ? getString(R.string.working) : "";
        }
        if (loaded == null) {
            return getString(R.string.no_bundle);
        }
        if (engine.stopReason() != null) {
            return stopText(engine.stopReason());
        }
        return readyText(loaded);
    }

    private String stopText(String reason) {
        if (reason.equals("context")) {
            return getString(R.string.context_full);
        }
        return reason.equals("cancelled") ? getString(R.string.cancelled) : "";
    }

    private String readyText(Engine.Loaded loaded) {
        StringBuilder text = new StringBuilder(
            getString(R.string.ready, loaded.bundle.getName(), loaded.need.describe(), loaded.threads));
        if (loaded.warning != null) {
            text.append('\n').append(getString(R.string.warning, loaded.warning));
        }
        if (!loaded.chats) {
            text.append('\n').append(getString(R.string.raw_only));
        }
        if (loaded.offReason != null) {
            text.append('\n').append(getString(R.string.drafting_off, loaded.offReason));
        }
        if (loaded.threads != app().settings().threads()) {
            text.append('\n').append(getString(R.string.threads_fixed));
        }
        return text.toString();
    }

    private void askToLoadAnyway(final Failure failure) {
        new AlertDialog.Builder(this)
            .setTitle(R.string.does_not_fit)
            .setMessage(failure.detail)
            .setNegativeButton(R.string.cancel, null)
            .setPositiveButton(R.string.load_anyway,
                new DialogInterface.OnClickListener() {
                    @Override
                    public void onClick(DialogInterface dialog, int which) {
                        engine().load(failure.bundle, app().settings(), true);
                    }
                })
            .show();
    }

    @Override
    public void text(String piece) {
        boolean atEnd = scroll.getScrollY() + scroll.getHeight() >= transcript.getHeight() - 64;
        ((TextView) transcript.getChildAt(transcript.getChildCount() - 1)).append(piece);
        if (atEnd) { // else somebody reads further up
            scrollDown();
        }
    }

    private void scrollDown() {
        scroll.post(new Runnable() {
            @Override
            public void run() {
                scroll.scrollTo(0, transcript.getHeight());
            }
        });
    }

    @Override
    public void figures() {
        Figures now = engine().figures();
        figures.setVisibility(now == null ? View.GONE : View.VISIBLE);
        if (now == null) {
            return;
        }
        String memory = Memory.megabytes(now.residentBytes);
        String line = now.drafts
            ? getString(
                R.string.live, now.tokensPerSecond, now.firstTokenS, 100 * now.acceptance, now.draftLength, memory)
            : getString(R.string.live_plain, now.tokensPerSecond, now.firstTokenS, memory);
        String off = now.offReason == null ? "" : "\n" + getString(R.string.drafting_off, now.offReason);
        figures.setText(line + off);
    }
}
