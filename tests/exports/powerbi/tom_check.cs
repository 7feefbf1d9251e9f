// Loads a TMDL folder with Microsoft's own serializer and prints what it found.
using System;
using Microsoft.AnalysisServices.Tabular;

class TomCheck
{
    static int Main(string[] arguments)
    {
        try
        {
            var model = TmdlSerializer.DeserializeDatabaseFromFolder(arguments[0]).Model;
            int measures = 0;
            foreach (var table in model.Tables) measures += table.Measures.Count;
            Console.WriteLine("tables={0} measures={1} relationships={2}",
                model.Tables.Count, measures, model.Relationships.Count);
            return 0;
        }
        catch (Exception error)
        {
            Console.WriteLine(error.GetType().Name + ": " + error.Message);
            return 1;
        }
    }
}
